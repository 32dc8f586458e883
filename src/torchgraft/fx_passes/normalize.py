"""torch.fx's experimental.normalize: arguments by name, and one spelling of operators. Both give a new module.
The work of the first is `torchgraft.passes.NormalizeArguments`.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.fx_passes.small_passes import AnnotateTypesWithSchema
from torchgraft.interpreter import Transformer
from torchgraft.passes.normalize_arguments import NormalizeArguments

_OPERATORS: dict[Any, Any] = {
    torch.add: operator.add, torch.mul: operator.mul, torch.sub: operator.sub, torch.div: operator.truediv,
    torch.floor_divide: operator.floordiv, torch.remainder: operator.mod, torch.eq: operator.eq, torch.ne: operator.ne,
    torch.lt: operator.lt, torch.le: operator.le, torch.gt: operator.gt, torch.ge: operator.ge,
}  # fmt: skip


class NormalizeArgs(Transformer):
    """`NormalizeArgs(module).transform()`: a copy in which every argument has its name and the defaults are written.

    >>> import torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.nn.functional.relu(x))
    >>> print(NormalizeArgs(module).transform().code.strip())
    def forward(self, x):
        relu = torch.nn.functional.relu(input = x, inplace = False);  x = None
        return relu
    """

    def __init__(self, module: GraphModule, normalize_to_only_use_kwargs: bool = True) -> None:
        super().__init__(module)
        self.normalize_to_only_use_kwargs = normalize_to_only_use_kwargs

    def transform(self) -> GraphModule:
        result = GraphModule(self.module, copy.deepcopy(self.module.graph))  # type: ignore[arg-type]
        NormalizeArguments(keywords=self.normalize_to_only_use_kwargs).run(result)
        return result


class NormalizeOperators(AnnotateTypesWithSchema):
    """`NormalizeOperators(module).transform()`: a copy in which `torch.add(x, y)` and its like are `x + y`, and whose nodes have
    the types that schemas say.

    >>> import torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.add(x, torch.mul(x, 2)))
    >>> print(NormalizeOperators(module).transform().code.strip())
    def forward(self, x):
        mul = x * 2
        add = x + mul;  x = mul = None
        return add
    """

    binary_magic_method_remap = _OPERATORS

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A call, in the spelling of Python where there is one."""
        if len(args) == 2 and not kwargs:
            target = self.binary_magic_method_remap.get(target, target)
        return super().call_function(target, args, kwargs)
