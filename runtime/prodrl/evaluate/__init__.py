"""The gate's measurements of a candidate; the verdict is the operator's.

``run`` is the step ``prodrl evaluate``. ``agreement`` compares the engine's logprobs with the trainer's weights
(computed by ``reference``); ``play`` runs the items of a suite (found by ``suites``, spoken to through ``chat``)
against both policies at once, and ``paired`` turns the outcomes into a difference with an interval.
"""
