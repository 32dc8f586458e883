"""What Python reads out of tensors in a watched run: here questions that torch answers with a computation and a number."""

import logging

import pytest
import torch

import torchgraft


def has_padding(x: torch.Tensor) -> torch.Tensor:
    if 3 in x[:, [-1, 0]]:
        return x * 2
    return x + 1


@pytest.mark.parametrize("level", ["module", "function", "aten", "core_aten"])
def test_whether_a_tensor_contains_a_number_is_checked(level: str) -> None:
    program = torchgraft.capture(has_padding, torch.ones(2, 3), level=level)
    assert torch.equal(program(torch.zeros(4, 3)), torch.ones(4, 3))
    with pytest.raises(torchgraft.GuardError, match="if 3 in x"):
        program(torch.full((2, 3), 3.0))


@pytest.mark.parametrize("level", ["module", "function", "aten", "core_aten"])
def test_that_check_can_be_compiled_as_one_graph(level: str) -> None:
    program = torchgraft.capture(has_padding, torch.ones(2, 3), level=level)
    torch._dynamo.reset()  # which gives up on code that was compiled too often, by other tests
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(2, 3)), torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="if 3 in x"):
        compiled(torch.full((2, 3), 3.0))


def test_what_a_tensor_cannot_contain_raises_as_in_eager() -> None:
    for run in (has_text, lambda x: torchgraft.capture(has_text, x)):
        with pytest.raises(RuntimeError, match="Tensor"):
            run(torch.ones(2))


def has_text(x: torch.Tensor) -> torch.Tensor:
    return x if "text" in x else x + 1


logger = logging.getLogger("tests")


def torch_compilable_check(condition: torch.Tensor, message: str) -> None:
    """The name under which transformers checks that a text has a place for every image."""
    if not condition:
        raise ValueError(message)


def speaks(x: torch.Tensor) -> torch.Tensor:
    total = x.sum()
    torch_compilable_check(
        total < 100,
        f"too much: {total} in {x.shape[0]}",
    )
    logger.info(f"{total} in {x.shape[0]}")
    return x * 2


def uses_a_text(x: torch.Tensor) -> torch.Tensor:
    return x * len(f"{x.sum()}")


def uses_a_text_on_that_line(x: torch.Tensor) -> torch.Tensor:
    logger.info("two ("); y = x * {"2": 2.0, "3": 3.0}[f"{x.shape[0]}"]  # fmt: skip  # noqa: E702
    return y


def test_what_is_only_said_is_not_checked() -> None:
    program = torchgraft.capture(speaks, torch.ones(2))
    assert not program.meta["kept_whole"]
    assert torch.equal(program(torch.ones(5)), torch.full((5,), 2.0))
    with pytest.raises(torchgraft.GuardError, match="if not condition"):
        program(torch.full((3,), 99.0))
    assert "takes a tensor out of torch" in torchgraft.capture(uses_a_text, torch.ones(2)).meta["kept_whole"][""]
    with pytest.raises(torchgraft.GuardError, match=r"x.size\(0\)"):
        torchgraft.capture(uses_a_text_on_that_line, torch.ones(2))(torch.ones(3))
