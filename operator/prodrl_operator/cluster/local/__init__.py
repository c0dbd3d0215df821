"""The local environment: a cluster's behaviour on one Linux machine, without Kubernetes and without containers.

Reading order: ``applying`` and ``garbage`` (pure), ``admission`` and ``schema`` (what the store accepts),
``journal`` (durability), ``store`` (the Cluster port over them), ``workloads`` (what Kubernetes' controllers do),
``podspec`` and ``volumes`` (a pod as processes and folders, pure), ``shim``, ``probes`` and ``runner`` (the kubelet),
``proxy`` (Services), ``environment`` (all of it behind one class).
"""
