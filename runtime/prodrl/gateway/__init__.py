"""The durable endpoint in front of the policies.

``server.serve`` starts it. Reading order: ``app`` (what a request may be), ``proxy`` (how it is answered),
``routing`` (by which policy), ``feedback`` (rewards in, durable before they are acknowledged), ``admin`` (what the
operator pushes and reads). ``identity``, ``wire`` and ``routing`` are pure; only ``upstream``, ``segments``,
``keys``, ``spool`` and ``server`` touch the world.
"""
