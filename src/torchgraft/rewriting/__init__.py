"""Patterns: match a subgraph of a program and put another in its place.
Single edits of nodes belong to `ir`; whole passes that use patterns belong to `passes`.
"""

from torchgraft.rewriting.explain import Explanation, explain
from torchgraft.rewriting.found import Found, call_any
from torchgraft.rewriting.replace import Match, ReplacedPatterns, replace_pattern, replace_pattern_with_filters
from torchgraft.rewriting.rewrite import PerMatch, rewrite

__all__ = [
    "Explanation",
    "Found",
    "Match",
    "PerMatch",
    "ReplacedPatterns",
    "call_any",
    "explain",
    "replace_pattern",
    "replace_pattern_with_filters",
    "rewrite",
]
