"""The fixtures of tests/support/s3.py, for this tier only: they need a server."""

from tests.support.s3 import own_server, real_config, real_server, s3_binary

__all__ = ["own_server", "real_config", "real_server", "s3_binary"]
