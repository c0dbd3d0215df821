"""The API: pydantic models of ProdRLRun and ProdRLRound, and the CRDs generated from them (``crd``)."""

from prodrl_operator.api.round import Round, RoundSpec, RoundStatus
from prodrl_operator.api.run import Run, RunSpec, RunStatus

__all__ = ["Round", "RoundSpec", "RoundStatus", "Run", "RunSpec", "RunStatus"]
