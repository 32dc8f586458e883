"""Alias: the names that code written for torch.fx imports from `torch.fx.graph_module`; they live in `torchgraft.codegen`."""

from torchgraft.codegen.graph_module import GraphModule as GraphModule
from torchgraft.codegen.source import PythonCode as PythonCode
from torchgraft.fx_passes.attributes import USER_PRESERVED_ATTRIBUTES_KEY as _USER_PRESERVED_ATTRIBUTES_KEY  # noqa: F401
from torchgraft.fx_passes.attributes import CodeOnlyModule as _CodeOnlyModule  # noqa: F401
from torchgraft.fx_passes.attributes import assign_attr as _assign_attr  # noqa: F401
from torchgraft.fx_passes.attributes import copy_attr as _copy_attr  # noqa: F401
from torchgraft.fx_passes.attributes import del_attr as _del_attr  # noqa: F401
from torchgraft.fx_passes.attributes import get_attr as _get_attr  # noqa: F401
from torchgraft.fx_passes.attributes import has_attr as _has_attr  # noqa: F401
from torchgraft.fx_passes.semi_private import PyTreeCodeGenOfInfo as _PyTreeCodeGen  # noqa: F401
from torchgraft.fx_passes.semi_private import WrappedCall as _WrappedCall  # noqa: F401
from torchgraft.fx_passes.semi_private import compatibility as compatibility
from torchgraft.fx_passes.semi_private import exec_with_source as _exec_with_source  # noqa: F401
from torchgraft.fx_passes.semi_private import format_import_statement as _format_import_statement  # noqa: F401
from torchgraft.fx_passes.semi_private import forward_from_src as _forward_from_src  # noqa: F401
from torchgraft.ir.graph import Graph as Graph
