"""explain(): guards that are alike are one line, in plain words.
The guards themselves are in test_guards.py.
"""

import torch
from torch import nn

from torchgraft import capture, symbolic_trace, zoo


def test_a_program_without_guards() -> None:
    text = symbolic_trace(nn.Linear(2, 2)).explain()
    assert text == "The program has no guards: nothing was fixed when it was captured."


def test_one_condition() -> None:
    program = capture(lambda x, flag=False: x if flag else x + 1, (torch.ones(2),))
    lines = program.explain().splitlines()
    assert lines == [
        "The program was captured for this, and raises GuardError in any other case:",
        "  1. the argument 'flag' is False",
        f"     in the inputs of {test_one_condition.__qualname__}.<locals>.<lambda>",
    ]


def test_norms_of_a_resnet_are_one_line() -> None:
    program = capture(zoo.resnet50().eval(), (torch.randn(1, 3, 64, 64),), level="function")
    assert len(program.guards) >= 53
    lines = program.explain().splitlines()
    assert len(lines) == 3
    assert lines[1] == "  1. 53 BatchNorm2d check that their input has 4 dimensions"
    assert lines[2].startswith("     first at ") and "resnet.py:" in lines[2]


def test_arguments_that_are_not_given_are_one_line() -> None:
    program = capture(lambda x, mask=None, cache=None, flag=True: x, (torch.ones(2),))
    assert "  1. the arguments 'mask', 'cache' are None" in program.explain().splitlines()
    assert "  2. the argument 'flag' is True" in program.explain().splitlines()


def test_a_line_that_runs_many_times_is_one_line() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.cat([x, x]) if x.shape[0] < 100 else x
        return x

    text = capture(model, (torch.ones(2),)).explain()
    assert text.count("test_explaining.py") == 2  # one for the input itself, one for what comes of it
    assert "and the same for 2 more" in text
