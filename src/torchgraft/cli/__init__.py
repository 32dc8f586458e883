"""The command `graft`, one file per command; each offers NAME, SUMMARY, add_arguments(parser) and run(arguments).
Files here import torch only inside the functions that need it, so that `graft --help` answers at once.
"""
