"""prodrl: the runtime of production reinforcement learning on Kubernetes.

Reading order: ``config`` (what a process is told), ``records`` (what is recorded), ``store`` (where it lies),
``recorder`` and ``gateway`` (serving), ``collect``, ``train`` (start at ``train/loop.py``), ``export``,
``evaluate``, ``lab`` (a laboratory that plays the users), ``cli`` (one command a process).
"""

__version__ = "0.1.0"
