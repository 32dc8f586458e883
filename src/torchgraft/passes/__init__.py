"""Edits of a program, one file each. What they need to know about it is answered in `analysis/`, and patterns that match
and replace are in `rewrite/`.
"""
