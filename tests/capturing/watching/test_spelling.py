"""How torch's functions are written in a program."""

from __future__ import annotations

import warnings

import torch

from torchgraft.capturing.watching.spelling import spelling_of


def test_methods_are_told_from_functions_as_torch_tells_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch's properties are deprecated
        functions = [item for found in torch.overrides.get_overridable_functions().values() for item in found]
        methods = {id(item) for item in functions if torch.overrides.is_tensor_method_or_property(item)}
    assert len(functions) > 1000 and methods
    called = [item for item in functions if not isinstance(item, property)]
    wrong = [item for item in called if (spelling_of(item).opcode == "call_method") is not (id(item) in methods)]
    assert not wrong
