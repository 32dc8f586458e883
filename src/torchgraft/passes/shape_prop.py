"""ShapeProp: run a program and note in `node.meta` what every value looks like, under torch.fx's name and interface.
The same without touching the program is `torchgraft.analysis.shapes.shapes`.
"""

from __future__ import annotations

from typing import Any

from torchgraft.analysis.dry_run import contents_of, where
from torchgraft.analysis.fake import active_fake_mode, fake_module, fake_tree
from torchgraft.analysis.fake_calls import FakeCalls, FakeInterpreter
from torchgraft.analysis.shapes.metadata import TensorMetadata, tensor_metadata, tree_metadata
from torchgraft.errors import GraphError
from torchgraft.ir.node import Node

__all__ = ["ShapeProp", "TensorMetadata"]

_extract_tensor_metadata = tensor_metadata  # the name that code written for torch.fx imports


class ShapeProp(FakeInterpreter):
    """Runs a program node by node and notes `meta["tensor_meta"]` and `meta["type"]` of every value.

    With `fake_mode`, or while one is active, it runs on fake copies and nothing is computed.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.t())
    >>> result = ShapeProp(program).propagate(torch.ones(2, 3))
    >>> [tuple(node.meta["tensor_meta"].shape) for node in program.graph.nodes]
    [(2, 3), (3, 2), (3, 2)]
    """

    def __init__(self, gm: Any, fake_mode: Any = None) -> None:
        super().__init__(gm)
        self.real_module = self.module
        self.fake_mode = fake_mode if fake_mode is not None else active_fake_mode()
        self.fake_module: Any = None
        if self.fake_mode is not None:
            self.fake_module = fake_module(contents_of(self.module), self.fake_mode)
            self.calls = FakeCalls(self.fake_mode)

    def run_node(self, n: Node) -> Any:
        """Compute one value and note what it looks like."""
        try:
            result = self._run_on_fakes(n) if self.fake_mode is not None else super().run_node(n)
        except Exception as error:
            raise GraphError(
                f"ShapeProp error for: node={n.format_node()}: {type(error).__name__}: {error}; at {where(n)}; "
                "look at the shapes of its inputs in their meta['tensor_meta']"
            ) from error
        metadata = tree_metadata(result)
        meta = n.meta
        if metadata is not None:
            meta["tensor_meta"] = metadata
        meta["type"] = type(result)
        return result

    def _run_on_fakes(self, n: Node) -> Any:
        assert self.fake_mode is not None
        if n._op in ("call_function", "call_method"):
            return super().run_node(n)  # `calls` knows the mode
        self.module = self.fake_module
        try:
            if n._op == "call_module":
                return super().run_node(n)
            with self.fake_mode:
                return super().run_node(n)
        finally:
            self.module = self.real_module

    def propagate(self, *args: Any) -> Any:
        """Run the program on `args` and return its result."""
        if self.fake_mode is not None:
            args = fake_tree(args, self.fake_mode)
        return self.run(*args)
