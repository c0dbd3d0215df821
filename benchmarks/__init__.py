"""Measurements that are too long for a test. Each package says in its docstring what it measures and how to run it."""
