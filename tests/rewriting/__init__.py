"""Tests of pattern rewriting: what matches, where a replacement goes, what comes with it, and how long that takes.

That the public names behave as torch.fx's is examined in `tests/compatibility` as well.
"""
