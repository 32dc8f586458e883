"""A model watched while it runs on example inputs: what is written down of one run, and whether two runs did the same.
What `capture` makes of the runs is in `program.py`, beside this room.
"""
