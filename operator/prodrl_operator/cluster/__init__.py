"""The cluster port and its implementations: ``local`` (this machine) and ``kubernetes`` (an API server)."""
