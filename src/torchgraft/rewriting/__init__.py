"""Patterns: match a subgraph of a program and put another in its place.
Single edits of nodes belong to `ir`; whole passes that use patterns belong to `passes`.
"""

from torchgraft.rewriting.replace import Match, ReplacedPatterns, replace_pattern, replace_pattern_with_filters

__all__ = ["Match", "ReplacedPatterns", "replace_pattern", "replace_pattern_with_filters"]
