"""The path under which torch.fx users import pattern rewriting.
The work lives in `torchgraft.rewriting`.
"""

from torchgraft.rewriting.replace import Match, ReplacedPatterns, replace_pattern, replace_pattern_with_filters

__all__ = ["Match", "ReplacedPatterns", "replace_pattern", "replace_pattern_with_filters"]
