"""Edits of a program, one file each. What they need to know about it is answered in `analysis/`; edits that match a
pattern are in `rewriting/`.
"""
