"""`capture` on programs of many kinds: what they take and return, what they write into, and what runs around them."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import numpy
import pytest
import torch
from torch import nn

import torchgraft
from tests.capturing.watched import captured_like_eager, given, is_looked_into, normal, runs_free
from torchgraft import GuardError, TraceError, capture


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


# ---- inputs and results ----


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    scale: float = 2.0
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    scale: float = 2.0


class Slots:
    __slots__ = ("__hidden", "scale", "x")

    def __init__(self, x: torch.Tensor, scale: float = 2.0) -> None:
        self.x, self.scale, self.__hidden = x, scale, 1

    def hidden(self) -> int:
        return self.__hidden


class Named(NamedTuple):
    x: torch.Tensor
    scale: float = 2.0


class Checked(collections.namedtuple("Checked", ["x", "scale"])):
    """A named tuple whose constructor wants a tensor."""

    __slots__ = ()

    def __new__(cls, x: torch.Tensor, scale: float = 2.0) -> Checked:
        assert x.dtype is torch.float32
        return super().__new__(cls, x, scale)


class Typed(TypedDict):
    x: torch.Tensor
    scale: float


class Scaled(Linear):
    def forward(self, sample: Any) -> Any:
        return type(sample)(self.linear(sample.x) * sample.scale, sample.scale + 1)


@pytest.mark.parametrize("kind", [Sample, Frozen, Slotted, Slots, Named, Checked], ids=lambda kind: kind.__name__)
def test_objects_in_and_out(kind: Callable[..., Any]) -> None:
    other = given(lambda: kind(torch.randn(5, 4), 3.0))
    program = captured_like_eager(Scaled, given(lambda: kind(torch.randn(3, 4))), [other])
    assert is_looked_into(program) and runs_free(program, other)


def test_an_object_that_is_changed_between_runs_is_read_again() -> None:
    sample = Slots(torch.ones(3, 4))
    program = capture(lambda given: given.x * given.scale, (sample,))
    sample.x, sample.scale = torch.zeros(3, 4), 5.0
    assert torch.equal(program(sample), torch.zeros(3, 4))


class OfDict(Linear):
    def forward(self, sample: Typed) -> Typed:
        return Typed(x=self.linear(sample["x"]), scale=sample["scale"] + len(sample))


def test_typed_dicts() -> None:
    program = captured_like_eager(
        OfDict, given({"x": torch.ones(3, 4), "scale": 2.0}), [given({"x": torch.ones(5, 4), "scale": 3.0})]
    )
    with pytest.raises(GuardError, match="parts"):
        program({"x": torch.ones(5, 4), "scale": 3.0, "more": 1})


class Way(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


class Odd(Linear):
    def forward(
        self,
        x: torch.Tensor,
        way: Way = Way.PLAIN,
        steps: Any = range(2),
        factors: Any = (1, [2]),
        part: Any = slice(0, 2),
        chosen: Any = frozenset({1, 2}),
        function: Any = torch.relu,
    ) -> Any:
        for _ in steps:
            x = self.linear(x) * (2 if way is Way.DOUBLE else 1)
        return function(x[part]) * factors[1][0] * max(chosen), way


def test_defaults_of_every_kind_can_be_left_out_and_given() -> None:
    x = torch.ones(3, 4)
    others: dict[str, Any] = {
        "way": Way.DOUBLE,
        "steps": range(1),
        "part": slice(1, 2),
        "chosen": frozenset({3}),
        "function": torch.tanh,
    }
    made = {**others, "function": lambda: torch.tanh}
    program = captured_like_eager(Odd, given(x), [given(x, **{name: value}) for name, value in made.items()])
    assert is_looked_into(program)
    for name, value in others.items():
        with pytest.raises(GuardError, match=f"(for|argument) '{name}'"):
            program(x, **{name: value})
    pickled = pickle.loads(pickle.dumps(program))
    torch.testing.assert_close(pickled(x)[0], program(x)[0])
    captured_like_eager(Odd, given(x, **made), [given(x)])


def test_iterators_are_refused_before_anything_is_taken_from_them() -> None:
    items = iter([torch.ones(2)])
    with pytest.raises(TraceError, match="list_iterator as the input 'items'.*give a list"):
        capture(lambda items: sum(items), (items,))
    with pytest.raises(TraceError, match=r"'items\[0\]'"):
        capture(lambda items: next(items[0]), ([items],))
    assert len(list(items)) == 1


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (lambda: collections.deque([torch.ones(2)]), lambda: collections.deque([torch.zeros(3)])),
        (lambda: numpy.ones(2), lambda: numpy.zeros(3)),
    ],
    ids=["deque", "array"],
)
def test_inputs_that_cannot_be_looked_into_keep_the_model_whole(value: Any, other: Any) -> None:
    program = captured_like_eager(lambda: lambda items: torch.as_tensor(items[0]) * 2, given(value), [given(other)])
    assert "cannot be looked into" in program.meta["kept_whole"][""]


class Returns(Linear):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.linear(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: collections.deque([x, x.shape[0]], maxlen=3),
        lambda x: types.SimpleNamespace(queue=collections.deque([x])),
        lambda x: Slots(x, Slots(x * 2)),
        lambda x: {1: x, "b": (x.shape[0], [None])},
        lambda x: collections.OrderedDict(a=Named(x, 1.0)),
    ],
    ids=["deque", "namespace", "slots", "keys", "ordered"],
)
def test_results_of_their_own_kind(make: Callable[[Any], Any]) -> None:
    other = given(normal(5, 4))
    program = captured_like_eager(functools.partial(Returns, make), given(normal(3, 4)), [other])
    assert is_looked_into(program) and runs_free(program, other)


class Generates(Linear):
    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(3):
            x = self.linear(x)
            yield x


@pytest.mark.parametrize(
    "make",
    [Generates, lambda: Returns(lambda x: iter([x])), lambda: Returns(lambda x: {"a": x}.values())],
    ids=["generator", "iterator", "view"],
)
def test_results_that_are_read_later_keep_the_model_whole(make: Callable[[], nn.Module]) -> None:
    model = make()
    program = capture(model, (torch.ones(2, 4),))
    for size in (3, 5):
        x = torch.randn(size, 4)
        torch.testing.assert_close(list(program(x)), list(model(x)))
    assert not is_looked_into(program)


# ---- objects that are written into ----


class Layer:
    def __init__(self) -> None:
        self.values: torch.Tensor | None = None
        self.length = 0


class Cache:
    """A cache as decoders have it: filled by each call, and returned."""

    def __init__(self, length: int = 0) -> None:
        self.layers: list[Layer] = []
        self.calls = 0
        if length:
            self.update(0, torch.randn(length, 4))

    def update(self, index: int, values: torch.Tensor) -> torch.Tensor:
        if index == len(self.layers):
            self.layers.append(Layer())
        layer = self.layers[index]
        layer.values = values if layer.values is None else torch.cat([layer.values, values])
        layer.length += values.shape[0]
        self.calls += 1
        return layer.values


class Decoder(Linear):
    def forward(self, x: torch.Tensor, cache: Cache) -> Sample:
        return Sample(cache.update(0, self.linear(x)).sum(0) + x, extra=cache)


@pytest.mark.parametrize("length", [0, 3], ids=["empty", "filled"])
def test_a_cache_is_filled_as_the_model_fills_it(length: int) -> None:
    other = given(normal(5, 4), functools.partial(Cache, length * 2))
    program = captured_like_eager(Decoder, given(normal(2, 4), functools.partial(Cache, length)), [other])
    assert is_looked_into(program) and runs_free(program, other)


def test_a_cache_step_by_step() -> None:
    model, ours, theirs = Decoder(), Cache(3), Cache(0)
    theirs = copy.deepcopy(ours)
    program = capture(model, (torch.ones(1, 4), ours))
    assert ours.calls == 1
    for _ in range(4):
        x = torch.randn(1, 4)
        found, expected = program(x, ours), model(x, theirs)
        torch.testing.assert_close(found.x, expected.x)
        assert found.extra is ours
    assert (ours.calls, ours.layers[0].length) == (theirs.calls, theirs.layers[0].length) == (5, 7)


def test_one_token_leaves_the_sizes_free() -> None:
    """`length > 1 and …` is false for one token, and a flag for torch."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        is_causal = x.shape[-2] > 1 and x.is_contiguous()
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=is_causal)

    program = capture(attend, (torch.ones(2, 1, 4),), dynamic={"x": [0]})
    assert torch.equal(program(torch.ones(5, 1, 4)), torch.ones(5, 1, 4))
    with pytest.raises(GuardError, match="> 1"):
        program(torch.ones(2, 3, 4))


class PopsAndAdds(Linear):
    def forward(self, items: dict[str, Any]) -> dict[str, Any]:
        x = items.pop("x")
        items["y"], items["n"] = self.linear(x), x.shape[0]
        return items


class Reverses(Linear):
    def forward(self, items: list[torch.Tensor]) -> Any:
        items.append(self.linear(items[0]))
        items[0] = items[1] * 2
        items.reverse()
        return items[0], items


@pytest.mark.parametrize(
    ("cls", "make"),
    [
        (PopsAndAdds, lambda size: {"x": torch.ones(size, 4), "z": 2}),
        (Reverses, lambda size: [torch.ones(size, 4), torch.full((size, 4), 2.0)]),
    ],
    ids=["dict", "list"],
)
def test_containers_are_written_as_the_model_writes_them(cls: type[nn.Module], make: Callable[[int], Any]) -> None:
    other = given(functools.partial(make, 5))
    program = captured_like_eager(cls, given(functools.partial(make, 3)), [other])
    assert is_looked_into(program) and runs_free(program, other)


class Counting(Linear):
    """Kept whole, because it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> Sample:
        self.calls += 1
        return Sample(self.linear(x) + (0 if cache is None else cache.layers[0].length), extra=[x])


class HandsOn(Linear):
    """The second module must see what was written before it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, x: torch.Tensor, cache: Cache) -> Any:
        cache.update(0, self.linear(x))
        return self.counting(x, cache)


class ChangesResult(HandsOn):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        result = self.counting(x)
        result.x = result.x * 2
        result.extra.append(result.x + 1)
        return result


def test_a_changed_object_that_is_handed_on_keeps_the_model_whole() -> None:
    program = captured_like_eager(HandsOn, given(normal(2, 4), functools.partial(Cache, 3)))
    assert "hands it on" in program.meta["kept_whole"][""]


def test_a_result_of_a_leaf_that_is_changed() -> None:
    program = captured_like_eager(ChangesResult, given(normal(2, 4)), [given(normal(5, 4))])
    assert list(program.meta["kept_whole"]) == ["counting"]


def test_objects_that_lose_an_attribute_keep_the_model_whole() -> None:
    def loses(sample: Sample) -> torch.Tensor:
        del sample.extra
        return sample.x * 2

    program = capture(loses, (Sample(torch.ones(2)),))
    sample = Sample(torch.ones(3))
    assert torch.equal(program(sample), torch.full((3,), 2.0)) and "extra" not in vars(sample)
    assert not is_looked_into(program)


# ---- how a model is called ----


class OwnCall(Linear):
    def __call__(self, x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
        return super().__call__(x * factor) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_call_of_the_models_own() -> None:
    x = torch.ones(3, 4)
    captured_like_eager(OwnCall, given(x), [given(x, factor=3.0)])
    captured_like_eager(OwnCall, given(x, factor=3.0), [given(x)])
    captured_like_eager(lambda: nn.Sequential(OwnCall()), given(x))


def with_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as transformers has it: it counts on settings coming by name."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("as_tuple") is None:
            kwargs["as_tuple"] = self.as_tuple
        return function(self, *args, **kwargs)

    return wrapper


class Decorated(Linear):
    as_tuple = True
    calls = 0

    @with_settings
    def forward(self, x: torch.Tensor, mask: Any = None, as_tuple: bool | None = None, **kwargs: Any) -> Any:
        self.calls += 1
        y = self.linear(x) * kwargs.get("factor", 1.0)
        y = y if mask is None else y * mask
        return (y,) if as_tuple else y


@pytest.mark.parametrize("keywords", [{}, {"mask": torch.ones(4)}, {"factor": 2.0}, {"as_tuple": False}], ids=str)
def test_a_decorated_forward_that_is_kept_whole_gets_its_defaults_by_name(keywords: dict[str, Any]) -> None:
    program = captured_like_eager(Decorated, given(normal(3, 4), **keywords), [given(normal(5, 4), **keywords)])
    assert list(program.meta["kept_whole"]) == [""]


# ---- programs in programs, and around them ----


def test_programs_are_captured_again() -> None:
    def make() -> nn.Module:
        return torchgraft.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    assert is_looked_into(captured_like_eager(make, given(normal(3, 4)), [given(normal(5, 4))]))
    captured_like_eager(lambda: capture(make(), (torch.ones(3, 4),)), given(normal(3, 4)), [given(normal(5, 4))])


class Captures(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return capture(self.linear, (x,))(x) + 1


def test_capture_inside_capture() -> None:
    captured_like_eager(Captures, given(normal(3, 4)), [given(normal(5, 4))])


def test_capture_inside_try_keeps_nothing_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    try:
        program = capture(model, (torch.ones(2, 4),), level="function")
    except RuntimeError:
        raise AssertionError("it runs in eager") from None
    except KeyError:
        program = None
    assert program is not None and is_looked_into(program)


def test_threads_capture_at_once() -> None:
    found: list[str] = []

    def work(number: int) -> None:
        model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3 + number)]), torch.ones(2 + number, 4)
        for _ in range(3):
            program = capture(model, (x,))
            calls = program.graph.find_nodes(op="call_module")
            assert len(calls) == 3 + number and torch.equal(program(x), model(x)) and is_looked_into(program)
        found.append("right")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["right"] * 4


# ---- what Python asks about a number ----


def _kind(value: Any) -> str:
    return "number" if type(value) == int else "other"  # noqa: E721


@functools.singledispatch
def _dispatched(value: Any) -> int:
    return 3


@_dispatched.register
def _(value: int) -> int:
    return 2


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x * 2 if type(x.shape[0]) is int else x,
        lambda x: x * {int: 2}.get(type(x.shape[0]), 3),
        lambda x: x * 2 if _kind(x.shape[0]) == "number" else x,
        lambda x: x * 2 if all(type(size) is int for size in x.shape) else x,
        lambda x: x * 2 if type(x.sum().item()) in (int, float) else x,
        lambda x: x * 2 if type(x.shape[0]).__name__ == "int" and isinstance(int, type) else x,
        lambda x: x * 2 if issubclass(type(x.shape[0]), int) else x,
        lambda x: x * 2 if type("Made", (), {})().__class__.__name__ == "Made" else x,
        lambda x: x * _dispatched(x.shape[0]),
    ],
    ids=["is", "key", "callee", "all", "item", "name", "subclass", "made", "dispatch"],
)
def test_types_of_numbers_are_those_of_eager(ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    program = captured_like_eager(lambda: ask, given(normal(3, 4)), [given(normal(5, 4))])
    assert is_looked_into(program) and "type" not in globals()


# ---- one thing given twice ----


def _writes_one(first: dict[str, Any], second: dict[str, Any]) -> torch.Tensor:
    first["x"] = first["x"] * 2
    return second["x"] + 1


def test_one_object_given_twice_is_one_object() -> None:
    def same() -> Any:
        items = {"x": torch.ones(2)}
        return (items, items), {}

    program = captured_like_eager(lambda: _writes_one, same)
    with pytest.raises(GuardError, match=r"\(second is first\) = True, and now it is False"):
        program({"x": torch.ones(2)}, {"x": torch.ones(2)})


def test_different_objects_may_not_become_one() -> None:
    program = captured_like_eager(
        lambda: _writes_one, given(lambda: {"x": torch.ones(2)}, lambda: {"x": torch.zeros(2)})
    )
    items = {"x": torch.ones(2)}
    with pytest.raises(GuardError, match="among the inputs twice"):
        program(items, items)
    assert torch.equal(items["x"], torch.ones(2))


def test_an_object_that_refers_to_itself() -> None:
    sample = Sample(torch.ones(2))
    sample.extra = sample
    program = capture(lambda given: given.extra.x * 2, (sample,))
    assert torch.equal(program(sample), torch.full((2,), 2.0))
    assert "refers to itself" in program.meta["kept_whole"][""]


class WritesInput(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.linear(x) if x.grad_fn is not None else x


def test_computed_inputs_may_be_written_into() -> None:
    leaf = torch.ones(3, 4, requires_grad=True)
    model = WritesInput()
    program = capture(model, (leaf * 1,))
    assert is_looked_into(program)
    torch.testing.assert_close(program(leaf * 3), model(leaf * 3))
    with pytest.raises(GuardError, match="grad_fn"):
        program(torch.ones(3, 4))


# ---- what a module that is kept whole gives ----


class Counts(nn.Module):
    """Is kept whole, because it counts its calls, and gives something else in training."""

    calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls = self.calls + 1
        return x * 2 if self.training else (x, x * 2)


class AsksWhatItGot(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.head = Counts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.linear(x))
        return found[1] if isinstance(found, tuple) else found


@pytest.mark.parametrize("is_training", [False, True])
def test_a_module_that_gives_something_else_in_another_mode(is_training: bool) -> None:
    model, x = AsksWhatItGot().train(is_training), torch.randn(2, 4)
    program = capture(model, (x,))
    assert list(program.meta["kept_whole"]) == ["head"]
    assert torch.equal(program(x), model(x))
    program.train(not is_training)
    with pytest.raises(GuardError, match="expected a .* as the result of 'head', got a t"):
        program(x)


class AsksForWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, weights = self.attention(x, x, x, need_weights=self.training)
        return found * 2 if weights is None else found + weights.sum()


@pytest.mark.parametrize("level", ["module", "function"])
@pytest.mark.parametrize("is_training", [False, True])
def test_a_layer_of_torch_that_gives_none_in_another_mode(level: str, is_training: bool) -> None:
    model, x = AsksForWeights().train(is_training), torch.randn(3, 2, 4)
    program = capture(model, (x,), level=level)
    torch.testing.assert_close(program(x), model(x))
    program.train(not is_training)
    with pytest.raises(GuardError):
        program(x)


def test_a_program_of_a_program_keeps_its_constants_apart() -> None:
    one, two, three = torch.arange(3.0), torch.arange(3.0) * 5, torch.arange(3.0) * 7
    first = capture(lambda x: x * one + two, (torch.ones(3),))
    second = capture(lambda x: first(x) * three + one, (torch.ones(3),))
    third, x = capture(second, (torch.ones(3),)), torch.randn(3)
    for program in (second, third, capture(third, (torch.ones(3),))):
        assert torch.equal(program(x), (x * one + two) * three + one)


# ---- a train() of the model's own ----


class Frozen(nn.Module):
    """Keeps its norm in evaluation, whatever mode it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class HasFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.dropout = Frozen(), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.frozen(x))


def test_a_train_of_a_leafs_own_runs() -> None:
    model, x = HasFrozen().eval(), torch.randn(3, 4)
    program = capture(model, (x,), leaf=Frozen)
    assert torch.equal(program(x), model(x))
    program.train()
    assert not model.frozen.norm.training
    torch.manual_seed(3)
    found = program(x)
    torch.manual_seed(3)
    assert torch.equal(found, model.train()(x))
