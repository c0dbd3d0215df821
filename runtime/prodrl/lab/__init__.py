"""The laboratory: chess puzzles, a tiny model that half knows them, simulated users, and the demo of the whole loop.

``prodrl lab`` (module ``cli``) is its command line. Nothing outside this package imports it, save the evaluation
suite ``prodrl.lab.suite:chess_puzzles``, which runs name in their manifests.
"""
