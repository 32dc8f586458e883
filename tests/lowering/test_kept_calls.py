"""Calls that stay one call in a training step: modules that were kept whole, and functions that cannot be taken apart."""

import copy
import pickle

import pytest
import torch
from torch import nn

from torchgraft import BridgeError, GuardError, capture, capture_training, wrap
from torchgraft.lowering.kept_calls import gradients_of, outline, run_kept
from torchgraft.lowering.tensors import TracedTensor
from torchgraft.lowering.training import TrainingPrograms

X = torch.randn(4, 6)


class Counting(nn.Module):
    """Kept whole: it counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return {"value": self.linear(x) * self.calls, "more": (x.exp(), self.calls > 0)}


class Network(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), inner

    def forward(self, x):
        found = self.inner(self.first(x))
        return found["value"].relu() + found["more"][0]


def eager(model, x):
    model.zero_grad()
    result = model(x)
    result.sum().backward()
    return result, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_step(programs, model, x):
    result, gradients = eager(model, x)
    step = programs.run(x)
    torch.testing.assert_close(step.results, result)
    torch.testing.assert_close(step.gradients, gradients)


def test_a_module_kept_whole_is_one_call():
    model = Network(Counting())
    twin = copy.deepcopy(model)
    programs = capture_training(model, (X,))
    assert model.inner.calls == 0
    kept = [node.args[0].target for node in programs.joint.graph.find_nodes(op="call_function", target=run_kept)]
    assert kept == ["inner"]
    assert len(programs.backward.graph.find_nodes(op="call_function", target=gradients_of)) == 1
    for x in (X, torch.randn(9, 6), torch.randn(1, 6)):
        assert_step(programs, twin, x)
    assert model.inner.calls == 3
    assert programs.run(X).gradients["inner.unused.weight"] is None


def test_it_travels():
    programs = capture_training(Network(Counting()), (X,))
    for other in (copy.deepcopy(programs), pickle.loads(pickle.dumps(programs))):
        assert isinstance(other, TrainingPrograms)
        torch.testing.assert_close(other.run(X).gradients, copy.deepcopy(programs).run(X).gradients)


class Caching(nn.Module):
    """Computes with its parameter once, and keeps the result with its history: autograd refuses a second backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.cache = {}

    def forward(self, x):
        if "weight" not in self.cache:
            self.cache["weight"] = self.weight.exp()
        return {"value": x * self.cache["weight"], "more": (x,)}


class Asking(nn.Module):
    """Asks gradients for a view of its input, as speech models do so that parts can be computed again in the backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # keeps it whole
        x = x[:, None]
        if x.is_leaf:
            x.requires_grad = True
        return {"value": (x * self.weight)[:, 0], "more": (x,)}


def test_a_view_of_the_input_that_the_call_asks_gradients_for_is_no_earlier_run():
    model = Asking()
    programs = capture_training(model, (X,), loss=lambda result: result["value"].exp().sum())
    gradient = torch.autograd.grad((X * model.weight).exp().sum(), model.weight)[0]
    for _ in range(2):
        torch.testing.assert_close(programs.run(X).gradients["weight"], gradient)


def test_gradients_of_an_earlier_run_are_refused():
    model = Network(Caching())
    programs = capture_training(model, (X,))
    assert_step(programs, copy.deepcopy(model), X)
    with pytest.raises(GuardError, match="depends on a tensor that requires a gradient and is not given to it"):
        programs.run(X)


class Choosing(Counting):
    def forward(self, x):
        self.calls += 1
        return {"value": self.linear(x), "more": (x,) if self.calls == 1 else (x, x)}


def test_another_structure_is_refused():
    programs = capture_training(Network(Choosing()), (X,), loss=torch.sum)
    programs.run(X)
    with pytest.raises(GuardError, match=r"returns \{value: tensor, more: \(tensor\)\}, and now it returns"):
        programs.run(X)


def test_a_function_that_cannot_be_taken_apart_is_one_call(monkeypatch):
    def sort(tensor):
        if type(tensor) is TracedTensor:
            raise RuntimeError("it wants memory")
        return tensor.sort().values

    sort.__module__ = "torch"  # only torch's own functions are looked into
    monkeypatch.setattr(torch, "sorted_values", sort, raising=False)
    model = nn.Linear(6, 6)
    program = capture(model, (X,), level="function")
    output = program.graph.output_node()
    with program.graph.inserting_before(output):
        output.args = (program.graph.call_function(sort, (output.args[0],)),)
    programs = capture_training(program, (X,))
    assert programs.joint.graph.find_nodes(op="call_function", target=run_kept)
    for x in (X, torch.randn(9, 6)):
        model.zero_grad()
        (sort(model(x)) * torch.arange(6.0)).sum().backward()
        step = programs.run(x, tangents=[torch.arange(6.0).expand(len(x), 6)])
        torch.testing.assert_close(step.gradients["weight"], model.weight.grad)


class Writing(Counting):
    def forward(self, x):
        self.calls += 1
        return {"value": self.linear(x.mul_(2)), "more": (x,)}


def test_a_call_that_writes_its_arguments_is_refused():
    with pytest.raises(BridgeError, match="in-place operation|writes its arguments"):
        capture_training(Network(Writing()), (X,))


def test_outlines():
    assert outline(({"a": torch.ones(2)}, [1, None], "x")) == "({a: tensor}, (1, None), 'x')"
    assert outline(torch.device("cpu")).startswith("device")


class Learning(nn.Module):
    """Kept whole: it learns while it runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.optimizer = torch.optim.SGD(self.linear.parameters(), lr=0.1, momentum=0.9)

    def forward(self, x):
        loss = self.linear(x.detach()).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"value": self.linear(x), "more": (x.exp(), True)}


class Resizing(nn.Module):
    """Kept whole: it gives a buffer another shape."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            self.seen.resize_(self.seen.shape[0] + 1).fill_(1.0)
        return {"value": x * self.seen.sum(), "more": (x.exp(), True)}


class Decaying(nn.Module):
    """Kept whole: it writes its parameter where autograd does not look."""

    def __init__(self):
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.ones(6)), 0

    def forward(self, x):
        self.calls += 1
        self.scale.data.mul_(0.5)
        return {"value": x * self.scale, "more": (x.exp(), True)}


class Turning(nn.Module):
    """Kept whole: its layers change places."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        value = self.layers[1](self.layers[0](x).relu())
        self.layers = nn.ModuleList(reversed(self.layers))
        return {"value": value, "more": (x.exp(), True)}


@pytest.mark.parametrize("is_root", [False, True], ids=["a module", "the model"])
@pytest.mark.parametrize("inner", [Learning, Resizing, Decaying, Turning])
def test_what_writes_its_own_parameters_or_moves_its_tensors_is_refused(inner, is_root):
    model = inner() if is_root else Network(inner())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        BridgeError, match=f"{inner.__name__} is one call, and writes or moves its own parameters, or gives its tensors"
    ):
        capture_training(model, (X,))
    torch.testing.assert_close(model.state_dict(), before)


class Noting(nn.Module):
    """Kept whole as a model: it notes its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.shapes = nn.Linear(6, 6), 0, []

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        return self.linear(x).relu() * scale


def test_a_model_kept_whole_is_one_call_of_a_training_step():
    model = Noting()
    programs = capture_training(model, (X,), {"scale": 2.0})
    assert (model.calls, model.shapes) == (0, [])
    step = programs.run(X[:3], scale=2.0)
    assert (model.calls, model.shapes) == (1, [(3, 6)])
    result = model(X[:3], scale=2.0)
    result.sum().backward()
    torch.testing.assert_close(step.results, result)
    torch.testing.assert_close(step.gradients, {name: value.grad for name, value in model.named_parameters()})


def test_a_function_kept_whole_is_refused():
    seen = []

    def count(x):
        seen.append(1)
        return x * len(seen)

    with pytest.raises(BridgeError, match="the function is one call that runs Python\n  because"):
        capture_training(count, (X.requires_grad_(),))


def padded(x, weight):
    """Decides by a size."""
    if x.shape[0] % 2:
        x = torch.cat([x, x[:1]])
    return (x @ weight).view(x.shape[0] // 2, 2, -1)


wrap("padded")


def test_a_function_that_decides_by_sizes_stays_one_call():
    class Padding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return padded(x, self.weight) * 2

    model = Padding()
    programs = capture_training(model, (X,))
    assert programs.joint.graph.find_nodes(op="call_function", target=run_kept)
    for rows in (4, 5, 9):
        x = torch.randn(rows, 6)
        result = model(x)
        gradient = torch.autograd.grad(result.sum(), model.weight)[0]
        step = programs.run(x)
        torch.testing.assert_close(step.results, result.detach())
        torch.testing.assert_close(step.gradients["weight"], gradient)
