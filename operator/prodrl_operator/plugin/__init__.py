"""``kubectl prodrl``: what people at a terminal see of a run and may ask of it. Called by two console scripts.

Everything shown comes from the objects; everything written could have been written by Git: fields of ``spec`` only.
"""
