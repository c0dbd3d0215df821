"""The state machine of runs and rounds, pure. Called by ``controller``.

Reading order: ``observed`` (what is known), ``decision`` (what is answered), ``decide`` (the pass), ``transitions``
(the table), then one file a step: ``starting``, ``collecting``, ``training``, ``exporting``, ``deploying``, ``gating``,
``promoting``; ``planning`` turns stored statuses into intents.
"""

from prodrl_operator.rounds.decide import decide
from prodrl_operator.rounds.decision import Decision
from prodrl_operator.rounds.observed import Observed

__all__ = ["Decision", "Observed", "decide"]
