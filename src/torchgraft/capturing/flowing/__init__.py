"""Values that flow through a watched run and stay symbolic until Python asks for a plain one: sizes, numbers, dtypes.
Where they come from and how they are guarded is in `watching/`.
"""
