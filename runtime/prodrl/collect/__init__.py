"""Collect: the durable join of records and rewards into datasets, and the ledger of what was consumed.

``run`` is the step; ``join`` decides (pure), ``samples`` stitches turns, ``seal`` writes, ``ledger`` claims, ``audit``
proves that no trajectory was trained twice and none was lost silently.
"""
