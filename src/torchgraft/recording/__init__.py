"""What is written down about programs by running them: their calls, their values, where two part, and whether they are right.
The public functions are `log_calls` (`calls.py`), `record`, `compare` (`program_comparison.py`), `verify` and `doctor`; nothing
here changes a program.
"""
