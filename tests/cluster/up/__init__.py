"""A real Kubernetes of one node that lives and dies with one command. Started by ``scripts/test-cluster``.

``__main__`` (outside) checks what the machine has, makes namespaces, and cleans up after them; ``inside`` is process 1
of these namespaces and brings the node up: ``isolation`` (mounts, network), ``images`` and ``node`` (the programs).
Nothing here knows prodrl.
"""
