"""The path under which torch.fx users import pattern rewriting.
The work lives in `torchgraft.rewrite`.
"""

from torchgraft.rewrite.replace import Match, ReplacedPatterns, replace_pattern, replace_pattern_with_filters

__all__ = ["Match", "ReplacedPatterns", "replace_pattern", "replace_pattern_with_filters"]
