"""Trap programs: small models that a capture gets wrong easily, kept as data and tried in every way of capturing.
What is compared, and how a program is judged, is in `observation.py` and `runner.py`.
"""
