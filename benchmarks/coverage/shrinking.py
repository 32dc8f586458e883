"""Small configurations of transformers, as `graft` makes them for `hf:NAME`; which fields mean what is written down there.
Which architectures there are, and what their models are fed, is in `language_models`.
"""

from torchgraft.cli.small_configurations import FIELDS, FIRST_MARKER, VOCABULARY, smaller

__all__ = ["FIELDS", "FIRST_MARKER", "VOCABULARY", "smaller"]
