"""Verdicts from measurements, pure. Called by ``observing``; ``rounds`` acts on what they say.

No data is never Pass: a number that is missing or not finite is an Error, too little of it is Inconclusive.
"""

from prodrl_operator.gates.canary import judge_canary
from prodrl_operator.gates.verdict import judge_measurements

__all__ = ["judge_canary", "judge_measurements"]
