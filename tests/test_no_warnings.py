"""Ordinary use warns of nothing, neither by us nor by torch: every command and the common calls run with warnings as errors."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchgraft
from torchgraft.cli.main import COMMANDS, main

COMMAND_LINES = [
    "models",
    "capture zoo:mlp -o {}/kept",
    "capture zoo:mlp --level joint -o {}/kept.pt",
    "show zoo:mlp --level core_aten",
    "show zoo:mlp --level symbolic --as table",
    "summary zoo:mlp",
    "draw zoo:mlp --fold -o {}/mlp.svg",
    "calls zoo:mlp --level dispatch",
    "record zoo:mlp --gradients",
    "record zoo:mlp -o {}/values.safetensors",
    "compare zoo:mlp --against core_aten",
    "graph zoo:mlp --level joint -o {}/mlp.graphml",
    "graph zoo:mlp -o {}/mlp.pickle",
    "diff zoo:mlp zoo:mlp",
    "doctor zoo:mlp",
    "report zoo:mlp -o {}/report",
    "run-passes zoo:mlp remove-dead-code --check",
    "quantize zoo:mlp -o {}/small",
    "lower zoo:mlp --backend native -o {}/fast.pt",
    "bench zoo:mlp --backends native",
    "simulate zoo:mlp --batch 1,2",
    "pipeline zoo:mlp --stages 2 --simulate",
    "calibrate -o {}/mine.toml --seconds 5",
    "demo --model resnet18",
]


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_write_nothing_to_standard_error(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.format(tmp_path).split()) == 0
    assert capsys.readouterr().err == ""


def test_every_command_is_among_them() -> None:
    assert {line.split()[0] for line in COMMAND_LINES} == {command.NAME for command in COMMANDS}


# ---- the library ----


def model_of_a_function() -> torch.nn.Module:
    """A class that cannot be imported, as in most notebooks and tests, with results in containers."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return {"logits": torch.relu(self.linear(x)), "more": (x, [x + 1])}

    return Block().eval()


def saved(program: Any) -> Any:
    file = io.BytesIO()
    torch.save(program, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


X = torch.ones(2, 4)
CALLS: dict[str, Callable[[torch.nn.Module, Any], Any]] = {
    "save": lambda model, program: saved(program),
    "pickle": lambda model, program: pickle.loads(pickle.dumps(program)),
    "deepcopy": lambda model, program: copy.deepcopy(program),
    "readable": lambda model, program: program.print_readable(print_output=False),
    "to_fx and back": lambda model, program: torchgraft.from_fx(torchgraft.to_fx(program)),
    "draw": lambda model, program: torchgraft.draw(program),
    "networkx": lambda model, program: torchgraft.to_networkx(program),
    "effects": lambda model, program: torchgraft.effects(program),
    "passes": lambda model, program: torchgraft.passes.Pipeline("remove-dead-code, merge-common")(program),
}
ON_MODELS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "symbolic_trace": torchgraft.symbolic_trace,
    "summary": lambda model: torchgraft.summary(model, X),
    "cost": lambda model: torchgraft.cost(model, X),
    "memory": lambda model: torchgraft.memory(model, X),
    "doctor": lambda model: torchgraft.doctor(model, X),
    "record": lambda model: torchgraft.record(model, X, reduce=True),
    "log_calls": lambda model: torchgraft.log_calls(model, X),
    "compare": lambda model: torchgraft.compare(model, model, X),
    "capture_training": lambda model: torchgraft.capture_training(model, X, loss=lambda y: y["logits"].sum()).run(X),
    "from_export": lambda model: saved(torchgraft.from_export(torch.export.export(model, (X,)))),
    "export": lambda model: torch.export.export(torchgraft.capture(model, X), (X,)),
    "compile": lambda model: torch.compile(torchgraft.capture(model, X), backend="eager", fullgraph=True)(X),
}


@pytest.mark.parametrize("level", ["module", "function", "aten", "core_aten", "joint"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_done_with_programs(name: str, level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of_a_function()
    CALLS[name](model, torchgraft.capture(model, X, level=level))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ON_MODELS)
def test_what_is_done_with_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ON_MODELS[name](model_of_a_function())
    assert capsys.readouterr() == ("", "")
