"""A run on this machine: ``prodrl-operator local run.yaml --data DIR``. The same YAML, no cluster, no Docker.

``manifests`` reads the file, ``preflight`` refuses what cannot work, ``session`` turns the loop and draws the views.
"""
