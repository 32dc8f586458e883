"""`lower` with inputs that are hard to look into: containers and objects, other ranks, sums that broadcast, state, precision."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from torchgraft import Backend, lower
from torchgraft.backends.arrays import arrays_of
from torchgraft.errors import InputError
from torchgraft.ir.guards import is_guard


class Plain(Backend):
    """Runs parts as they are, one program for each size."""

    name = "plain"

    def compile(self, part: Any, inputs: Any, options: Any) -> Any:
        return part.forward


# ---- sizes and ranks inside containers ----


@dataclasses.dataclass
class Holder:
    x: torch.Tensor


@pytest.mark.parametrize("backend", ["native", "plain"])
def test_ranks_of_tensors_in_containers_are_checked(backend: str) -> None:
    def model(inputs: Any) -> Any:
        x = inputs["x"]
        return x.sum(-1) if x.dim() == 2 else x.sum(0)

    fast = lower(model, ({"x": torch.randn(3, 4)},), backend=Plain() if backend == "plain" else backend)
    for shape in ((3, 4), (3, 4, 5), (4,)):
        inputs = {"x": torch.randn(shape)}
        torch.testing.assert_close(fast(inputs), model(inputs))


def test_programs_for_one_size_see_the_sizes_in_objects() -> None:
    def model(holder: Any) -> Any:
        return holder.x / holder.x.shape[0]

    fast = lower(model, (Holder(torch.ones(3, 4)),), backend=Plain())
    for rows in (3, 5, 4):
        torch.testing.assert_close(fast(Holder(torch.ones(rows, 4))), torch.full((rows, 4), 1 / rows))


def test_a_linear_layer_whose_input_loses_a_dimension() -> None:
    class Squeezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.linear(x.squeeze())

    model = Squeezing().eval()
    fast = lower(model, torch.randn(3, 1, 4), backend="native")
    with torch.no_grad():
        for rows in (3, 1):
            x = torch.randn(rows, 1, 4)
            torch.testing.assert_close(fast(x), model(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Any, y: Any) -> Any:
        return torch.relu(self.conv(x) + y)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 1, 1), (2, 4, 5, 5)),
        ((2, 3, 5, 5), (2, 4, 1, 1)),
        ((2, 3, 5, 1), (2, 4, 5, 5)),
        ((1, 3, 5, 5), (2, 4, 5, 5)),
    ],
)
def test_a_convolution_and_a_sum_that_broadcasts_later(shapes: Any) -> None:
    model = Residual().eval()
    fast = lower(model, (torch.randn(2, 3, 5, 5), torch.randn(2, 4, 5, 5)), backend="native")
    inputs = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        torch.testing.assert_close(fast(*inputs), model(*inputs))


def test_results_of_any_rank_stay_contiguous() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2)).eval()
    fast = lower(model, torch.randn(2, 3, 6, 6), backend="native")
    assert fast(torch.randn(2, 3, 6, 6)).is_contiguous()


def test_gradients_of_tensors_in_containers_are_refused() -> None:
    fast = lower(lambda inputs: inputs["x"] * 2, ({"x": torch.ones(3)},), backend="native")
    with pytest.raises(InputError, match="computes no gradients"):
        fast({"x": torch.ones(3, requires_grad=True)})


def test_another_precision_reaches_results_in_objects() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return Holder(self.linear(x))

    result = lower(Held().eval(), torch.randn(2, 4), backend="native", precision="bf16")(torch.randn(2, 4))
    assert type(result) is Holder and result.x.dtype is torch.float32


def test_compiling_parts_leaves_buffers_alone() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.count += 1
            return x * self.count

    model = Counter().eval()
    fast = lower(model, torch.ones(2), backend=Plain())
    calls = model.count.item()
    assert fast(torch.ones(3)).tolist() == [calls + 1] * 3
    assert model.count.item() == calls + 1 == 1


@pytest.mark.parametrize("chooses", [False, True])
def test_a_program_that_writes_and_takes_any_keywords(chooses: bool) -> None:
    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any = None, mask: Any = None, **kwargs: Any) -> Any:
            result = torch.zeros_like(x)
            result[:, 0] = 1
            if chooses:
                result = result[x[:, 0].nonzero().flatten()]
            return self.linear(x + result)

    model = Open().eval()
    fast = lower(model, (), {"x": torch.randn(2, 4)}, backend="native")
    with torch.no_grad():
        x = torch.randn(3, 4)
        torch.testing.assert_close(fast(x=x), model(x=x))


class Memory:
    """An object that a model writes into, as the caches of language models are."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.zeros(rows, 4)


@pytest.mark.parametrize("backend", ["native", "plain"])
def test_lowering_leaves_objects_that_are_given_alone(backend: str) -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any, memory: Any) -> Any:
            memory.rows = torch.cat([memory.rows, self.linear(x)])
            return memory.rows.sum(0)

    model = Remembering().eval()
    fast = lower(model, (torch.ones(1, 4), Memory(2)), backend=Plain() if backend == "plain" else backend)
    with torch.no_grad():
        for rows in (2, 3, 5):
            ours, theirs = Memory(rows), Memory(rows)
            torch.testing.assert_close(fast(torch.ones(1, 4), ours), model(torch.ones(1, 4), theirs))
            torch.testing.assert_close(ours.rows, theirs.rows)
            assert type(ours.rows) is torch.Tensor


class Forgetful(Backend):
    """Leaves out what has no result, as exporters do."""

    name = "forgetful"

    def compile(self, part: Any, inputs: Any, options: Any) -> Any:
        for node in list(part.graph.nodes):
            if node.op == "call_function" and (is_guard(node.target) or node.target is torch._assert):
                part.graph.erase_node(node)
        return part.forward


def test_checks_of_values_stay_in_python() -> None:
    def model(x: Any) -> Any:
        y = torch.sin(x) * 2
        torch._assert(x.min() > -5, "too small")
        return y + 1 if x.max() > 1000 else y - 1

    fast = lower(model, torch.ones(3), backend=Forgetful())
    for x in (torch.ones(3), torch.full((3,), 2000.0), torch.ones(4)):
        torch.testing.assert_close(fast(x), model(x))
    with pytest.raises(AssertionError, match="too small"):
        fast(torch.full((3,), -6.0))


class Labelled(torch.Tensor):
    """A class of somebody's own."""


class ByArrays(Backend):
    """Computes with the arrays of its inputs, like the runtimes."""

    name = "by-arrays"

    def compile(self, part: Any, inputs: Any, options: Any) -> Any:
        return lambda *given: part(*[torch.from_numpy(array) for array in arrays_of(given)])


def _with_label(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.label = "cat"
    return x


UNUSUAL = {
    "a class of its own": lambda x: x.as_subclass(Labelled),
    "an attribute": _with_label,
    "sparse": lambda x: x.to_sparse(),
    "a negative view": torch._neg_view,
    "of mkldnn": lambda x: x.to_mkldnn(),
    "a parameter": nn.Parameter,
    "strides": lambda x: x.t().contiguous().t(),
}


@pytest.mark.parametrize("backend", ["native", ByArrays()])
def test_unusual_inputs_and_then_usual_ones(backend: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    lowered = lower(model, torch.ones(2, 4), backend=backend)
    with torch.no_grad():
        for make in UNUSUAL.values():
            x = make(torch.randn(3, 4))
            found, expected = lowered(x), model(x)
            assert type(found) is type(expected) and found.layout is expected.layout
            torch.testing.assert_close(found.to_dense(), expected.to_dense())
        torch.testing.assert_close(lowered(torch.ones(2, 2, 4)), model(torch.ones(2, 2, 4)))
    runs = [row["runs"] for row in lowered.variants().rows()]
    assert runs.count(lowered.backend.name) == 2  # what the model's own Python runs for is not what looks otherwise


@pytest.mark.parametrize("backend", ["native", ByArrays()])
def test_transforms_and_derivatives_forwards_are_of_the_model(backend: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    x, tangent = torch.randn(3, 4), torch.randn(3, 4)
    lowered = lower(model, x, backend=backend)

    def dual(function: Any) -> Any:
        with forward_ad.dual_level(), torch.no_grad():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent

    for take in (
        dual,
        lambda function: torch.func.jvp(function, (x,), (tangent,))[1],
        torch.func.vmap,
        lambda function: torch.func.jacfwd(function)(x),
    ):
        found, expected = take(lowered), take(model)
        if callable(found):
            found, expected = found(x.expand(2, 3, 4)), expected(x.expand(2, 3, 4))
        torch.testing.assert_close(found, expected)


class Copies(Backend):
    """Returns copies, like the runtimes."""

    name = "copies"

    def compile(self, part: Any, inputs: Any, options: Any) -> Any:
        return lambda *given: tree_map(torch.clone, part(*given))


def test_results_that_are_views_of_inputs_stay_so() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.view(-1)[1:], x.chunk(2)[1], x.relu().view(-1), x

    lowered, x = lower(model, torch.randn(2, 4), backend=Copies()), torch.randn(2, 4)
    for found, expected in zip(lowered(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)
    found, other, _, same = lowered(x)
    found[0], other[0, 0] = 5.0, 6.0
    assert (x[0, 1], x[1, 0]) == (5.0, 6.0) and same is x
    assert "view: its result shares memory with an input" in lowered.explain()
    assert "relu" not in lowered.explain()


def test_linear_layers_of_a_model_that_takes_any_number_of_inputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return sum((self.linear(item) for item in inputs), torch.zeros(4))

    model = Model().eval()
    x, y = torch.randn(2, 3, 4)
    fast = lower(model, (x, y), backend="native")
    torch.testing.assert_close(fast(x, y), model(x, y))
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("backend", ["native", "plain"])
def test_a_call_that_compiles_draws_what_the_model_draws(backend: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    model[1].train()
    x = torch.randn(3, 4)
    fast = lower(model, x, backend=Plain() if backend == "plain" else backend)
    fast.refresh()
    for given in (x, x[:2]):
        torch.manual_seed(0)
        found = fast(given)
        torch.manual_seed(0)
        torch.testing.assert_close(found, model(given))


class Answer:
    """An object that is made from tensors; nobody knows what making it does."""

    def __init__(self, new: torch.Tensor, part: torch.Tensor, given: torch.Tensor) -> None:
        self.new, self.part, self.given = new, part, given


def test_what_is_made_anew_is_taken_also_beside_an_input_in_an_object() -> None:
    def model(x: torch.Tensor) -> Answer:
        return Answer(x.cos().relu(), x.view(-1), x)

    lowered, x = lower(model, torch.randn(2, 4), backend=Copies()), torch.randn(2, 4)
    found = lowered(x)
    torch.testing.assert_close(found.new, model(x).new)
    found.part[0] = 5.0
    assert x[0, 0] == 5.0 and found.given is x
    assert "view: its result shares memory with an input" in lowered.explain()
    assert "relu" not in lowered.explain() and "cos" not in lowered.explain()
