"""Skeleton."""
def register():
    from prodrl.recorder import cpu
    cpu.prepare()
