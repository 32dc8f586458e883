"""A file as a user writes it, which `mypy --strict` has to accept: every group of public names, and what they return.
It is checked by `test_typing.py` and also run there, so that it says nothing that is not so.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import torch
from torch import nn

import torchgraft as fx
from torchgraft.passes import Pass, Pipeline, PipelineReport, register


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.relu(self.layer(x))
        return result


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.ReLU) or super().is_leaf_module(m, module_qualified_name)


class Names(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        assert_type(n.name, str)
        return super().run_node(n)


class ReluToTanh(fx.Transformer):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(torch.tanh if target is torch.relu else target, args, kwargs)


@register
@dataclass(frozen=True)
class ReluToSigmoid(Pass):
    times: int = 1

    def run(self, module: fx.GraphModule) -> int:
        found = module.graph.find_nodes(op="call_function", target=torch.relu)
        for node in found:
            with module.graph.inserting_after(node):
                new = module.graph.call_function(torch.sigmoid, node.args)
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)
        return len(found)


def captured(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    traced = assert_type(fx.symbolic_trace(model), fx.GraphModule)
    assert_type(traced.graph, fx.Graph)
    assert_type(traced.code, str)
    Names(traced).run(x)
    assert_type(ReluToTanh(traced).transform(), fx.GraphModule)
    fx.GraphModule(model, Leaves().trace(model))
    lowered = assert_type(fx.lower(fx.capture(model, x, level="function"), x, level="core_aten"), fx.GraphModule)
    lowered.print_readable(print_output=False)
    fx.capture_training(model, x, loss=lambda y: y.sum()).run(x)
    return fx.capture(model, x, dynamic={"x": [0]})


def looked_at(program: fx.GraphModule, model: nn.Module, x: torch.Tensor, folder: Path) -> None:
    assert_type(fx.summary(model, x), fx.ModelSummary)
    assert_type(fx.diff(program, program), fx.ProgramDiff)
    assert_type(fx.draw(program, x, path=folder / "net.svg"), fx.Drawing)
    assert_type(fx.cost(program, x), fx.Cost)
    assert_type(fx.memory(program, x), fx.Memory)
    assert_type(fx.shapes(program, x), fx.Shapes)
    assert_type(fx.effects(program), fx.ProgramEffects)
    assert_type(fx.to_dot(program), str)
    fx.save_graph(program, folder / "net.json")
    for name, node in fx.to_networkx(program).nodes(data=True):
        assert name and node
    assert fx.record(program, x)["relu"] is not None
    assert fx.log_calls(model, x).names
    assert fx.compare(model, program, x).ok
    assert fx.verify(program, model, x).ok and program.verify(model, x).ok


def changed(program: fx.GraphModule, x: torch.Tensor) -> None:
    found = fx.rewrite(program, lambda a: torch.relu(a), lambda a: torch.relu(a))
    assert_type(found[0], fx.Found)
    report = assert_type(Pipeline("relu-to-sigmoid, remove-dead-code")(program), PipelineReport)
    assert report.changes == 1
    parts = assert_type(fx.split(program, fx.Size(nodes=1)), fx.Split)
    assert parts.module is not None
    for node in program.graph.nodes:
        assert_type(node, fx.Node)
        assert_type(node.users, dict[fx.Node, None])
    try:
        fx.symbolic_trace(lambda y: y if y.sum() > 0 else -y)
    except fx.TraceError as error:
        assert_type(error, fx.TraceError)


if TYPE_CHECKING:  # mistakes are found: an ignore that is not needed is an error, too
    fx.capture(Net(), torch.ones(2), level=3)  # type: ignore[arg-type]
    fx.symbolic_trace(Net()).graph.erase_node("relu")  # type: ignore[arg-type]
    fx.cost(Net()).flopz  # type: ignore[attr-defined]


def main(folder: Path) -> None:
    model, x = Net(), torch.randn(2, 4)
    program = captured(model, x)
    looked_at(program, model, x, folder)
    changed(program, x)
    fx.from_fx(fx.to_fx(program))
