"""Alias: the names that torch.fx users import from `torch.fx.operator_schemas`; they live in `torchgraft.analysis`."""

from torchgraft.analysis.signatures import ArgsKwargsPair as ArgsKwargsPair
from torchgraft.analysis.signatures import check_for_mutable_operation as check_for_mutable_operation
from torchgraft.analysis.signatures import create_type_hint as create_type_hint
from torchgraft.analysis.signatures import get_signature_for_torch_op as get_signature_for_torch_op
from torchgraft.analysis.signatures import normalize_function as normalize_function
from torchgraft.analysis.signatures import normalize_module as normalize_module
from torchgraft.analysis.signatures import python_type as _torchscript_type_to_python_type  # noqa: F401
from torchgraft.analysis.signatures import type_matches as type_matches
