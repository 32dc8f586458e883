"""Peak memory beside what the profiler counts, and the parts that it is made of."""

import json
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from benchmarks.allocations import taken_on_cpu, taken_on_gpu
from torchgraft import zoo
from torchgraft.analysis.memory import memory

# Large enough that activations, not the private buffers of convolution kernels, make up the peak.
MODELS: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "resnet50": ("resnet50", {}, 4, {"size": 96}),
    "transformer": ("transformer", {"layers": 3, "width": 128}, 4, {"length": 64}),
    "fused transformer": ("transformer", {"layers": 3, "width": 128, "attention": "fused"}, 4, {"length": 64}),
}


def subject(name: str) -> tuple[nn.Module, torchgraft.GraphModule, tuple[torch.Tensor, ...]]:
    zoo_name, options, batch, sizes = MODELS[name]
    model = zoo.create(zoo_name, **options)
    return model, torchgraft.symbolic_trace(model), zoo.example_inputs(zoo_name, batch=batch, **sizes)


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_predicted_within_five_percent(name: str) -> None:
    _, program, args = subject(name)

    def step() -> None:
        result = program(*args)
        result.backward(torch.ones_like(result))

    predicted = memory(program, args, training=True)
    assert predicted.peak - predicted.resident == pytest.approx(taken_on_cpu(step), rel=0.05)
    assert predicted.gradients == sum(parameter.nbytes for parameter in program.parameters())


@pytest.mark.parametrize("name", ["transformer", "fused transformer"])
def test_a_run_is_predicted_within_five_percent(name: str) -> None:
    _, program, args = subject(name)

    def run() -> None:
        with torch.no_grad():
            program(*args)

    predicted = memory(program, args)
    assert predicted.peak - predicted.resident == pytest.approx(taken_on_cpu(run), rel=0.05)


def test_a_run_of_convolutions_is_predicted_within_five_percent() -> None:
    program = torchgraft.symbolic_trace(zoo.create("resnet18").eval())
    args = zoo.example_inputs("resnet18", batch=4, size=224)

    def run() -> None:
        with torch.no_grad():
            program(*args)

    run()
    predicted = memory(program, args)
    assert predicted.peak - predicted.resident == pytest.approx(taken_on_cpu(run), rel=0.05)


def test_a_step_with_an_optimizer_has_its_state() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    program = torchgraft.symbolic_trace(model)
    x = torch.ones(8, 256)
    optimizer = torch.optim.Adam(program.parameters())

    def step() -> None:
        optimizer.zero_grad()
        result = program(x)
        result.backward(torch.ones_like(result))
        del result
        optimizer.step()

    step()
    optimizer.zero_grad()
    predicted = memory(program, x, optimizer=torch.optim.Adam)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert predicted.optimizer_state == pytest.approx(2 * weights, rel=0.01)
    assert predicted.peak - predicted.resident == pytest.approx(taken_on_cpu(step), rel=0.05)
    assert predicted.peak_at[0] == "optimizer"


def test_what_is_saved_for_backward_is_named() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * 2).relu().sum()

    x = torch.ones(1000, requires_grad=True)
    predicted = memory(torchgraft.symbolic_trace(function), x, training=True)
    assert predicted.saved == {"exp": 4000, "relu": 4000}
    assert predicted.saved_for_backward == 8000
    assert memory(torchgraft.symbolic_trace(function), x).saved == {}


def test_views_shared_weights_and_writes_in_place_cost_nothing_twice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(100, 100, bias=False)
            self.second = nn.Linear(100, 100, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            y.relu_()
            return self.second(y.t().t())

    x = torch.ones(100, 100)
    predicted = memory(Tied(), x)
    assert predicted.parameters == 40_000 and predicted.inputs == 40_000
    assert predicted.peak - predicted.resident == 80_000


def test_values_are_gone_after_their_last_use() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x.exp()
        return x

    predicted = memory(chain, torch.ones(1000))
    assert predicted.peak - predicted.resident == 8000
    assert predicted.timeline[-1].live == predicted.resident + 4000
    assert [moment.node for moment in predicted.timeline[-2:]] == ["exp_9", None]


def test_hostile_programs() -> None:
    assert memory(lambda x: x, torch.ones(3)).peak == 12
    assert memory(lambda x: x + 1, torch.ones(0)).peak == 0
    huge = torch.empty(1 << 18, 1 << 18, device="meta")
    assert memory(lambda x: x @ x, huge).peak == 2 << 38
    frozen = memory(nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4), training=True)
    assert frozen.gradients == 0 and frozen.saved == {}


def test_the_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    memory(model, torch.ones(3, 4), optimizer=torch.optim.SGD)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rows_json_and_text() -> None:
    predicted = memory(zoo.create("mlp"), zoo.example_inputs("mlp", batch=4), training=True)
    data = json.loads(predicted.to_json())
    assert data["peak"] == predicted.peak and len(data["timeline"]) == len(predicted.rows())
    assert sum(predicted.at_peak.values()) == predicted.peak
    assert "saved for backward" in str(predicted) and "peak in the backward of" in str(predicted)
    assert "<table>" in predicted._repr_html_()


def on_gpu(name: str, **sizes: int) -> tuple[torchgraft.GraphModule, tuple[torch.Tensor, ...]]:
    program = torchgraft.symbolic_trace(zoo.create(name).cuda())
    return program, tuple(tensor.cuda() for tensor in zoo.example_inputs(name, batch=8, **sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("name, sizes", [("resnet50", {"size": 224}), ("transformer", {"length": 128})])
@pytest.mark.parametrize("make", [None, torch.optim.SGD, torch.optim.Adam])
def test_a_training_step_on_a_gpu_is_predicted_within_five_percent(name: str, sizes: dict[str, int], make: Any) -> None:
    program, args = on_gpu(name, **sizes)
    optimizer = None if make is None else make(program.parameters(), lr=1e-3)

    def step() -> None:
        program.zero_grad()
        result = program(*args)
        result.backward(torch.ones_like(result))
        if optimizer is not None:
            optimizer.step()

    step()
    program.zero_grad()
    taken = taken_on_gpu(step)
    predicted = memory(program, args, training=True, optimizer=make)
    assert predicted.peak - predicted.resident == pytest.approx(taken, rel=0.05)
    assert predicted.device == "cuda" and predicted.workspaces and not predicted.unmeasured


@pytest.mark.gpu
@pytest.mark.parametrize("name, sizes", [("resnet50", {"size": 224}), ("transformer", {"length": 128})])
def test_a_run_on_a_gpu_is_predicted_within_five_percent(name: str, sizes: dict[str, int]) -> None:
    program, args = on_gpu(name, **sizes)

    def run() -> None:
        with torch.no_grad():
            program(*args)

    run()
    taken = taken_on_gpu(run)
    predicted = memory(program, args)
    assert predicted.peak - predicted.resident == pytest.approx(taken, rel=0.05)


@pytest.mark.gpu
def test_a_model_elsewhere_is_asked_about_on_a_gpu() -> None:
    there = memory(
        zoo.create("resnet18").cuda(), tuple(x.cuda() for x in zoo.example_inputs("resnet18")), training=True
    )
    asked = memory(zoo.create("resnet18"), zoo.example_inputs("resnet18"), training=True, device="cuda")
    assert (asked.peak, asked.workspaces, asked.device) == (there.peak, there.workspaces, "cuda")
