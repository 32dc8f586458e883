"""Thin adapters for code written for the passes of torch.fx: one file for each subject, each with torch.fx's interface over the
engine that lives in another room. Which import path of torch.fx leads to which file is one table, in `paths.py`.
"""
