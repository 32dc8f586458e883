"""How torch's functions are written in a program."""

from __future__ import annotations

import warnings

import torch

from torchgraft import capture
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


def test_operators_with_a_number_in_front_are_written_as_they_were() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.int()
        return 1 / x, 2 - x, (-2) ** n, 2 // x, 2.5 % x, 1 << n, 64 >> n, x // 2, ~n, x.shape[0] / x, x.__rsub__(x + 1)

    x = torch.rand(3) + 1
    program = capture(model, x, level="function")
    for text in (
        "1 / x",
        "2 - x",
        "(-2) ** int_1",
        "2 // x",
        "2.5 % x",
        "1 << int_1",
        "64 >> int_1",
        "x // 2",
        "~int_1",
    ):
        assert f" = {text}" in program.code
    assert "size / x" in program.code and "x.__rsub__(add)" in program.code  # of two tensors the first is asked first
    for inputs in (x, torch.rand(5) + 2):
        for found, expected in zip(program(inputs), model(inputs), strict=True):
            assert torch.equal(found, expected)
    torch.export.export(program, (x,), strict=True)  # which knows no `__rdiv__`
