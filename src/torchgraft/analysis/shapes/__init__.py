"""Shapes: what each value of a program looks like (shape, dtype, strides, memory format), found with or without computing.
Shapes as expressions of named sizes come through torch's symbolic sizes and are in `bridge/symbolic_shapes.py`.
"""

from torchgraft.analysis.shapes.metadata import Shapes, TensorMetadata, shapes, tensor_metadata, tree_metadata

__all__ = ["Shapes", "TensorMetadata", "shapes", "tensor_metadata", "tree_metadata"]
