"""Alias: the names that code written for torch.fx imports from `torch.fx.graph`; they live in `torchgraft.ir` and `codegen`."""

from torchgraft.codegen.source import INPLACE_TEXT as inplace_methods  # noqa: F401
from torchgraft.codegen.source import OPERATOR_TEXT as magic_methods
from torchgraft.codegen.source import CodeGen as CodeGen
from torchgraft.codegen.source import PythonCode as PythonCode
from torchgraft.fx_passes.semi_private import PyTreeCodeGenOfInfo as _PyTreeCodeGen  # noqa: F401
from torchgraft.fx_passes.semi_private import PyTreeInfo as _PyTreeInfo  # noqa: F401
from torchgraft.fx_passes.semi_private import compatibility as compatibility
from torchgraft.ir.arguments import immutable_dict as immutable_dict
from torchgraft.ir.graph import Graph as Graph
from torchgraft.ir.names import Namespace as _Namespace  # noqa: F401
from torchgraft.ir.names import snake_case as _snake_case  # noqa: F401
from torchgraft.ir.node import Argument as Argument
from torchgraft.ir.node import Node as Node
from torchgraft.ir.node import Target as Target
from torchgraft.ir.node import map_arg as map_arg
from torchgraft.ir.printing import DTYPE_LETTERS as dtype_abbrs  # noqa: F401
from torchgraft.ir.printing import qualified_name as _get_qualified_name  # noqa: F401
from torchgraft.ir.printing import type_text as _type_repr  # noqa: F401

_NOT_REFLECTABLE = ("eq", "ne", "lt", "gt", "le", "ge", "pos", "neg", "invert")
reflectable_magic_methods = {name: text for name, text in magic_methods.items() if name not in _NOT_REFLECTABLE}
