"""Tracing leaves the model, the random states and torch's switches exactly as they were, whether it succeeds or fails.
A forward that changes its own model is refused with the line that does it; patches are the business of `test_threads.py`.
"""

from __future__ import annotations

import collections
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchgraft
from tests.properties.observation import Snapshot


class Child(nn.Module):
    """Called by some forwards; its own forward writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen: list[Any] = []
        self.count = 0
        self.register_buffer("memory", torch.zeros(3))

    def forward(self, x):
        return self.linear(x)


class Notes:
    """A plain object that a model keeps."""

    def __init__(self) -> None:
        self.count = 0
        self.items: list[Any] = []


class Model(nn.Module):
    """A model with state of every kind; its forward is handed in."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = (body,)
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3)
        self.child = Child()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("memory", torch.ones(3))
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.k = 0
        self.plain = torch.ones(3)
        self.items: list[Any] = []
        self.table: dict[str, Any] = {"inner": []}
        self.known: set[Any] = set()
        self.queue: collections.deque[Any] = collections.deque()
        self.ordered: Any = collections.OrderedDict()
        self.grouped: Any = collections.defaultdict(list)
        self.notes = Notes()
        self.scale.grad = torch.full((3,), 2.0)
        self.linear.weight.grad = torch.ones(3, 3)
        self.linear.register_forward_pre_hook(lambda module, args: None)
        options = {"with_kwargs": True, "always_call": True}
        self.handle = (self.norm.register_forward_hook(lambda module, args, kwargs, output: None, **options),)

    def forward(self, x):
        return self.body[0](self, x)


def traced_and_unchanged(model: nn.Module) -> torchgraft.GraphModule | Exception:
    """Trace a model; whatever comes of it, the model must be as it was."""
    torch.manual_seed(7)
    random.seed(7)
    before = Snapshot.of(model)
    result: Any
    try:
        result = torchgraft.symbolic_trace(model)
    except Exception as error:
        result = error
    change = before.difference(Snapshot.of(model))
    assert change is None, f"tracing changed {change} (and gave {result!r})"
    return result


# ---- forwards that may be traced ----


def draws(self, x):
    return functional.dropout(x) + torch.rand(3) + random.random() + torch.bernoulli(self.memory) + torch.randn_like(x)


def seeds(self, x):
    torch.manual_seed(3)
    random.seed(3)
    return x + torch.rand(3)


def constants(self, x):
    table = torch.zeros(3)
    table.add_(1)
    return x + table + torch.tensor([1.0, 2.0, 3.0])


def writes_buffers(self, x):
    self.memory.mul_(0.5).add_(x.mean(0))
    self.hidden.copy_(x[0])
    self.child.memory.add_(1)
    self.plain.zero_()
    return x + self.memory


def writes_parameters(self, x):
    with torch.no_grad():
        self.scale.mul_(0.5)
        self.linear.weight.add_(1)
    return x * self.scale


def calls_modules(self, x):
    return self.norm(self.drop(self.linear(x))) + self.child(x)


def asks_the_mode(self, x):
    return self.drop(x) if self.training else functional.dropout(x, 0.1, self.child.training)


def writes_the_same_again(self, x):
    self.k = 0
    self.train()
    self.memory = self.memory
    return x + self.k


def switches(self, x):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    with torch.inference_mode():
        z = x * 2
    return y, z


def draws_with_library_functions(self, x):
    return x + functional.gumbel_softmax(torch.zeros(3)) + functional.rrelu(torch.ones(3), training=True)


def initialises(self, x):
    return x + nn.init.kaiming_uniform_(torch.empty(3, 3)).sum() + nn.init.normal_(torch.empty(3))


TRACEABLE = [
    draws, seeds, constants, writes_buffers, writes_parameters, calls_modules, asks_the_mode, writes_the_same_again, switches,
    draws_with_library_functions, initialises,
]  # fmt: skip


@pytest.mark.parametrize("body", TRACEABLE, ids=lambda body: body.__name__)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_successful_trace_changes_nothing(body, training):
    model = Model(body).train(training)
    if body is writes_the_same_again and not training:
        pytest.skip("train() is a change there")
    result = traced_and_unchanged(model)
    assert isinstance(result, torchgraft.GraphModule), result


def sets_gradients_off(self, x):
    torch.set_grad_enabled(False)
    return x * 2


def test_a_switch_that_the_forward_leaves_on_is_put_back():
    try:
        traced_and_unchanged(Model(sets_gradients_off))
    finally:
        torch.set_grad_enabled(True)


# ---- forwards that change the model: refused, with the line ----


def adds_to_a_number(self, x):
    self.k += 1
    return x * self.k


def assigns_a_value(self, x):
    self.cache = x
    return x


def assigns_a_buffer(self, x):
    self.memory = self.memory + x.mean(0)
    return x


def deletes(self, x):
    del self.linear
    return x


def appends(self, x):
    self.items.append(x)
    return x


def fills_a_dict(self, x):
    self.table["x"] = x
    return x


def fills_a_set(self, x):
    self.known.add("x")
    return x


def switches_the_mode(self, x):
    self.eval()
    return self.drop(x)


def switches_the_mode_of_a_child(self, x):
    self.child.eval()
    return x


def writes_to_a_child(self, x):
    self.child.count += 1
    return self.child(x)


def registers_a_buffer(self, x):
    self.register_buffer("late", x)
    return x


def writes_past_setattr(self, x):
    self.__dict__["late"] = 1
    return x


def appends_in_a_called_child(self, x):
    self.child.seen.append(x)
    return self.child(x)


def appends_in_an_uncalled_child(self, x):
    self.child.seen.append(x)
    return x


def appends_deep_inside(self, x):
    self.table["inner"].append(x)
    return x


def appends_to_a_deque(self, x):
    self.queue.append(x)
    return x


def fills_an_ordered_dict(self, x):
    self.ordered["x"] = x
    return x


def fills_a_default_dict(self, x):
    self.grouped["x"].append(x)
    return x


def writes_to_an_object(self, x):
    self.notes.count += 1
    return x * self.notes.count


def appends_to_an_object(self, x):
    self.notes.items.append(x)
    return x


def registers_a_hook(self, x):
    self.norm.register_forward_hook(lambda module, args, output: output)
    return self.norm(x)


def registers_a_hook_with_options(self, x):
    self.norm.register_forward_hook(lambda module, args, kwargs, output: output, with_kwargs=True, always_call=True)
    self.drop.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    return self.norm(x)


def removes_a_hook(self, x):
    self.handle[0].remove()
    return self.linear(x)


def clears_hooks(self, x):
    self.linear._forward_pre_hooks.clear()
    return self.linear(x)


def writes_an_attribute_of_a_buffer(self, x):
    self.memory.note = "seen"
    return x * self.memory


def writes_an_attribute_of_a_parameter(self, x):
    self._parameters["scale"].note = "seen"
    return x * self.scale


def writes_an_attribute_of_a_plain_tensor(self, x):
    self.plain.note = "seen"
    return x * self.plain


def registers_on_a_layer(self, x):
    self.norm.register_buffer("late", torch.zeros(3), persistent=False)
    self.norm.register_parameter("later", nn.Parameter(torch.zeros(3)))
    return self.norm(x)


def deletes_past_setattr(self, x):
    del self.linear._parameters["bias"]
    return self.linear(x)


def adds_a_module_to_a_layer(self, x):
    self.linear.add_module("late", nn.ReLU())
    return self.linear(x)


def replaces_a_weight_by_a_norm(self, x):
    nn.utils.parametrizations.weight_norm(self.linear)
    return self.linear(x)


def asks_for_gradients(self, x):
    self.memory.requires_grad = True
    return x * self.memory


def replaces_data(self, x):
    self.memory.data = torch.zeros(3)
    return x + self.memory


def drops_gradients(self, x):
    self.zero_grad()
    return self.linear(x)


REFUSED = [
    adds_to_a_number, assigns_a_value, assigns_a_buffer, deletes, appends, fills_a_dict, fills_a_set, switches_the_mode,
    switches_the_mode_of_a_child, writes_to_a_child, registers_a_buffer, writes_past_setattr, asks_for_gradients,
    replaces_data, drops_gradients,
]  # fmt: skip
REFUSED += [
    registers_a_hook, registers_a_hook_with_options, removes_a_hook, clears_hooks, writes_an_attribute_of_a_buffer,
    writes_an_attribute_of_a_parameter, writes_an_attribute_of_a_plain_tensor, registers_on_a_layer, deletes_past_setattr,
    adds_a_module_to_a_layer, replaces_a_weight_by_a_norm,
]  # fmt: skip
REFUSED += [
    appends_in_a_called_child, appends_in_an_uncalled_child, appends_deep_inside, appends_to_a_deque, fills_an_ordered_dict,
    fills_a_default_dict, writes_to_an_object, appends_to_an_object,
]  # fmt: skip


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_a_forward_that_changes_the_model_is_refused(body):
    error = traced_and_unchanged(Model(body))
    assert isinstance(error, torchgraft.TraceError), f"should have been refused, but gave {error!r}"


NAMED_EXACTLY = [
    adds_to_a_number, assigns_a_value, assigns_a_buffer, deletes, switches_the_mode, switches_the_mode_of_a_child,
    writes_to_a_child, replaces_data, drops_gradients,
]  # fmt: skip


@pytest.mark.parametrize("body", NAMED_EXACTLY, ids=lambda body: body.__name__)
def test_the_refusal_names_file_line_and_text(body):
    error = traced_and_unchanged(Model(body))
    lines, first = inspect.getsourcelines(body)
    assert f'{__file__}:{first + 1} "{lines[1].strip()}"' in str(error)


class Appending(nn.Module):
    """The write is in the class's own forward, which is where the message looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []

    def forward(self, x):
        y = x + 1
        self.items.append(y)
        return y


def test_the_refusal_of_an_append_names_file_line_and_text():
    error = traced_and_unchanged(Appending())
    line = inspect.getsourcelines(Appending.forward)[1] + 2
    assert isinstance(error, torchgraft.TraceError)
    assert f'{__file__}:{line} "self.items.append(y)"' in str(error)
    assert "self.items" in str(error)


# ---- traces that fail for another reason ----


def branches(self, x):
    self.memory.add_(1)
    return self.drop(x) if x.sum() > 0 else x


def reads_a_buffer(self, x):
    torch.rand(3)
    return x * float(self.memory[0])


def raises(self, x):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        functional.dropout(x)
        raise LookupError("mine")


def calls_a_stranger(self, x):
    return nn.ReLU()(x)


def makes_a_module(self, x):
    return nn.Linear(3, 3)(x)


def iterates(self, x):
    torch.rand(2)
    return [row + 1 for row in x]


def changes_and_fails(self, x):
    self.items.append(1)
    self.table["x"] = 2
    return x if x.sum() > 0 else -x


def changes_and_raises(self, x):
    self.child.seen.append(x)
    self.child(x)
    raise LookupError("mine")


FAILING = [branches, reads_a_buffer, raises, calls_a_stranger, makes_a_module, iterates, changes_and_fails]
FAILING += [changes_and_raises]


@pytest.mark.parametrize("body", FAILING, ids=lambda body: body.__name__)
def test_a_failing_trace_changes_nothing(body):
    error = traced_and_unchanged(Model(body))
    assert isinstance(error, (torchgraft.TraceError, LookupError)), error


def test_the_message_of_a_users_own_error_is_kept():
    error = traced_and_unchanged(Model(raises))
    assert isinstance(error, LookupError) and "mine" in str(error)


def test_wrong_arguments_change_nothing():
    model = Model(constants)
    before = Snapshot.of(model)
    with pytest.warns(UserWarning, match="no_such"):
        torchgraft.symbolic_trace(model, concrete_args={"no_such": 1})
    assert before.difference(Snapshot.of(model)) is None


def test_a_forward_with_hooks_is_refused_and_untouched():
    model = Model(constants)
    model.register_forward_hook(lambda *details: None)
    assert isinstance(traced_and_unchanged(model), torchgraft.TraceError)


def test_the_program_shares_the_models_tensors():
    model = Model(writes_buffers)
    module = torchgraft.symbolic_trace(model)
    assert module.memory is model.memory and module.child.memory is model.child.memory
    module(torch.ones(2, 3))
    assert model.memory.tolist() == [1.5, 1.5, 1.5]
