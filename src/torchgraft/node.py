"""Alias: the names that code written for torch.fx imports from `torch.fx.node`; they live in `torchgraft.ir`."""

from torchgraft.analysis.signatures import ArgsKwargsPair as ArgsKwargsPair
from torchgraft.analysis.signatures import normalize_function as normalize_function
from torchgraft.analysis.signatures import normalize_module as normalize_module
from torchgraft.fx_passes.semi_private import base_types as base_types
from torchgraft.fx_passes.semi_private import compatibility as compatibility
from torchgraft.fx_passes.semi_private import find_module_of_method as _find_module_of_method  # noqa: F401
from torchgraft.ir.arguments import map_aggregate as map_aggregate
from torchgraft.ir.node import Argument as Argument
from torchgraft.ir.node import Node as Node
from torchgraft.ir.node import Target as Target
from torchgraft.ir.node import _side_effectful_functions as _side_effectful_functions
from torchgraft.ir.node import has_side_effect as has_side_effect
from torchgraft.ir.node import map_arg as map_arg
from torchgraft.ir.printing import argument_text as _format_arg  # noqa: F401
from torchgraft.ir.printing import qualified_name as _get_qualified_name  # noqa: F401
from torchgraft.ir.printing import type_text as _type_repr  # noqa: F401
