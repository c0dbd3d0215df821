"""What people and machines look at: terminal view, live page, HTML report, ``summary.json``.

``snapshot`` reads the cluster once; everything else is drawn from that snapshot. Called by ``local``.
"""
