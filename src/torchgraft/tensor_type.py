"""The module path of torch.fx.tensor_type: types of tensors in which sizes may be left open.
The classes live in `analysis/types/`.
"""

from torchgraft.analysis.types.tensor_type import Dyn, TensorType, is_consistent, is_more_precise

__all__ = ["Dyn", "TensorType", "is_consistent", "is_more_precise"]
