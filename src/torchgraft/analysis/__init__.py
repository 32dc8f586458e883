"""Facts about a program: effects, signatures, shapes, cost. Nothing here edits a program; edits are in `passes/` and
`rewriting/`.
"""
