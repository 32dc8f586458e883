"""Gradual types of tensors: annotations in which sizes may be left open, and the check that a program can agree with them.
`tensor_type.py` is the types, `checking.py` the check and the sizes that are tried for what is left open.
"""

from torchgraft.analysis.types.checking import Types, check_types
from torchgraft.analysis.types.tensor_type import Dyn, TensorType, is_consistent, is_more_precise

__all__ = ["Dyn", "TensorType", "Types", "check_types", "is_consistent", "is_more_precise"]
