"""The trainer: one round of optimizer steps on a sealed dataset. Read ``loop`` first; ``losses`` has the formulas."""
