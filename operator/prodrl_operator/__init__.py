"""The operator of prodrl.

Reading order: ``names`` (every constant), ``api`` (ProdRLRun and ProdRLRound), ``rounds`` (the state machine, pure),
``gates`` (verdicts, pure), ``builders`` (manifests, pure), ``cluster`` (the port, the local environment, Kubernetes),
``controller`` (observe, decide, act, one status write), ``local`` (a run on this machine), ``cli``.
"""
