"""The model's Python attributes: writes are refused before they happen, and what gets past that is put back and refused.
Whole models before and after a trace are compared in test_model_untouched.py.
"""

import collections

import pytest
import torch
from torch import nn

import torchgraft as fx


class Model(nn.Module):
    """A model whose forward is `function(self, x)`."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.child = nn.Linear(2, 2)
        self.register_buffer("buffer", torch.zeros(2))
        self.count = 0
        self.items = [1]
        self.table = {"k": 1}
        self.seen = {1}
        self.history = collections.deque([1])
        self.groups = collections.defaultdict(list, a=[1])
        self.nested = {"k": [1]}
        self.thing = Thing()

    def forward(self, x):
        self.function(self, x)
        return x * 2


class Thing:
    def __init__(self) -> None:
        self.count = 0


def snapshot(model: Model) -> dict:
    return {
        "count": model.count,
        "items": list(model.items),
        "table": dict(model.table),
        "seen": set(model.seen),
        "history": list(model.history),
        "groups": {key: list(value) for key, value in model.groups.items()},
        "nested": {key: list(value) for key, value in model.nested.items()},
        "thing": model.thing.count,
        "names": sorted(vars(model)),
        "children": sorted(model._modules),
        "training": model.training,
        "buffer": model.buffer.tolist(),
    }


def assigns(self, x):
    self.count = self.count + 1


def assigns_a_traced_value(self, x):
    self.last = x


def assigns_a_tensor(self, x):
    self.buffer = torch.ones(2)


def assigns_a_module(self, x):
    self.child = nn.ReLU()


def adds_a_module(self, x):
    self.extra = nn.ReLU()


def assigns_in_a_child(self, x):
    self.child.in_features = 7


def deletes(self, x):
    del self.count


def changes_the_mode(self, x):
    self.eval()


AT_ONCE = [
    assigns, assigns_a_traced_value, assigns_a_tensor, assigns_a_module, adds_a_module, assigns_in_a_child, deletes,
    changes_the_mode,
]  # fmt: skip


def appends(self, x):
    self.items.append(x)


def stores_in_a_dict(self, x):
    self.table["k"] = 2


def adds_to_a_set(self, x):
    self.seen.add(2)


def goes_behind(self, x):
    self.__dict__["count"] = 7


def adds_behind(self, x):
    self.__dict__["fresh"] = 7


AFTERWARDS = [appends, stores_in_a_dict, adds_to_a_set, goes_behind, adds_behind]


def appends_to_a_deque(self, x):
    self.history.append(x)


def appends_in_a_defaultdict(self, x):
    self.groups["a"].append(x)


def appends_deep_inside(self, x):
    self.nested["k"].append(x)


def changes_an_object(self, x):
    self.thing.count += 1


DEEPER = [appends_to_a_deque, appends_in_a_defaultdict, appends_deep_inside, changes_an_object]


def check(function) -> str:
    model = Model(function)
    before = snapshot(model)
    with pytest.raises(fx.TraceError) as caught:
        fx.symbolic_trace(model)
    assert snapshot(model) == before
    return str(caught.value)


@pytest.mark.parametrize("function", AT_ONCE, ids=lambda function: function.__name__)
def test_writes_are_refused_with_the_line_and_the_model_is_as_before(function) -> None:
    message = check(function)
    assert "cannot trace a forward that changes the model: it writes self." in message
    assert f"{__file__}:{function.__code__.co_firstlineno + 1}" in message
    assert "The model is left as it was" in message


@pytest.mark.parametrize("function", AFTERWARDS, ids=lambda function: function.__name__)
def test_writes_that_go_past_attributes_are_found_afterwards(function) -> None:
    assert "it writes self." in check(function)


@pytest.mark.parametrize("function", DEEPER, ids=lambda function: function.__name__)
def test_writes_deeper_inside_are_found_too(function) -> None:
    check(function)


def nothing(self, x):
    self.count = self.count
    self.child = self.child
    self.train()


def test_writing_the_value_that_is_there_is_no_change() -> None:
    program = fx.symbolic_trace(Model(nothing))
    assert program(2) == 4


def test_a_change_of_a_child_names_its_path() -> None:
    assert "self.child.in_features" in check(assigns_in_a_child)


def test_modules_that_are_no_part_of_the_model_may_be_made_and_changed() -> None:
    def forward(x):
        scratch = nn.Module()
        scratch.value = 3
        return x * scratch.value

    assert fx.symbolic_trace(forward)(2) == 6


def test_the_model_is_as_before_when_the_trace_fails_otherwise() -> None:
    def fails(self, x):
        self.items.append(x)
        self.__dict__["count"] = 5
        raise KeyError("on purpose")

    model = Model(fails)
    before = snapshot(model)
    with pytest.raises(KeyError, match="on purpose"):
        fx.symbolic_trace(model)
    assert snapshot(model) == before


def test_the_order_of_attributes_is_kept() -> None:
    model = Model(goes_behind)
    before = list(vars(model))
    with pytest.raises(fx.TraceError):
        fx.symbolic_trace(model)
    assert list(vars(model)) == before


def test_a_tracer_may_edit_the_model_on_purpose() -> None:
    class Editing(fx.Tracer):
        def call_module(self, m, forward, args, kwargs):
            m.visited = True
            return super().call_module(m, forward, args, kwargs)

    model = nn.Sequential(nn.ReLU())
    Editing().trace(model)
    assert model[0].visited


def test_a_leaf_module_may_change_itself_when_the_program_runs() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, x):
            self.count += 1
            return x

    class Keep(fx.Tracer):
        def is_leaf_module(self, m, name):
            return True

    model = nn.Sequential(Counting())
    program = fx.GraphModule(model, Keep().trace(model))
    program(1), program(1)
    assert model[0].count == 2


class Numbers(tuple):
    """A tuple that does not like to be asked how long it is."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __contains__(self, item: object) -> bool:
        raise NotImplementedError


class Touchy:
    def __init__(self) -> None:
        self.items = [1]

    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")

    def __len__(self) -> int:
        raise ValueError("no length")

    __hash__ = None  # type: ignore[assignment]


class HoldsOddThings(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.odd: list[object] = [Numbers((1, 2)), (Touchy(), Numbers((Touchy(),)))]
        self.touchy = Touchy()
        self.numbers = Numbers((self.touchy, [2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.touchy.items[0]


@pytest.mark.parametrize("level", ["module", "function"])
def test_odd_things_among_the_attributes(level: str) -> None:
    model, x = HoldsOddThings(), torch.ones(2, 4)
    program = fx.capture(model, (x,), level=level)
    assert torch.equal(program(x), model(x)) and not program.meta["kept_whole"]
    assert torch.equal(fx.symbolic_trace(model)(x), model(x))
