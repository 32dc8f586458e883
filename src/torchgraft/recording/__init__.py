"""What is written down about programs by running them: whether they do what the model does, and what a capture fixed.
The public functions are `verify` (`verify.py`) and `doctor` (`doctor.py`); nothing here changes a program.
"""
