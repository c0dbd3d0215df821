"""The recorder: a vLLM plugin that writes down every completion as the engine made it.

``plugin`` is what vLLM loads; ``capture`` wraps ``AsyncLLM.generate``; ``sampling`` and ``record`` are pure and decide
what a record says; ``sink`` and ``spool`` bring records to the store; ``middleware`` gives requests their identity and
answers the readiness probe; ``cpu`` is for engines without a GPU. Nothing here may delay or fail a user's request.
"""
