"""Measuring a machine: which kernels are tried (`probes.py`), how they are timed (`measuring.py`), and how figures are fitted
to the times (`fitting.py`). What the figures mean is said in `timing.py`.
"""
