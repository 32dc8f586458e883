"""Random programs and random edits: what must hold for every one of them, not only for the examples somebody thought of.
Examples that once failed are kept beside them, in `test_found_programs.py`.
"""
