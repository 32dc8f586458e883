"""The code of the functions that run: what their bytecode compares, and other code that they run with during a capture.
Only code is read here; the values that it works on are in `flowing/`.
"""
