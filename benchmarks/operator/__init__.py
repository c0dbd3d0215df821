"""The operator at scale, on a real API server: ``python -m benchmarks.operator --runs 50 500 5000``.

etcd and kube-apiserver run on loopback, without kube-controller-manager: Jobs, Deployments and pods say what this
benchmark writes into their statuses. R runs in 50 namespaces are stamped from one that the operator itself drove, in
memory, into the middle of collecting round 1: the run, two rounds, and some twenty children that carry the marks of
what was applied, so that an operator which starts finds nothing to do. Gateways are one HTTP server on loopback; each
pod has an address of its own. ``prodrl-operator run`` is a process of its own.

For each size:

1. start: seconds until /readyz answers 200, and until every run was looked at once; requests that changed anything;
2. idle: requests a run and minute (by the API server's audit log, watches not counted), CPU, memory;
3. load: 20 changes a second that need an answer (servers of the stable policy come and go, a user edits the spec, a
   Job ends); from the commit of the change to the operator's first request about that run, both as the API server's
   audit log has them;
4. the same with the gateways of a tenth of the runs accepting connections and never answering; changes happen to the
   others;
5. killed with SIGKILL and started again: as 1, with the dead process's Lease in the way.

Prints a table with a row a size, ratios to the smallest size, and writes ``results.json`` into ``--out``. Times are
those of the machine, whose load average is reported with them. 125,000 objects (5,000 runs) take some minutes to make.
"""
