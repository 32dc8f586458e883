"""Traps: what a program reads and changes that is neither its own nor an argument: closures, defaults, attributes of functions,
classes and other modules, callable objects. State that a model keeps in itself is in `state.py`.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections import Counter, deque
from typing import Any

import torch
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection(sizes=(5,))
_NO_COPIES = frozenset({"pickled", "deep copy"})


def _nonlocal_counter() -> Any:
    count = 0

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * count

    return forward


def _closed_over_list() -> Any:
    seen: list[Any] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(None)
        return x * len(seen)

    forward.watched = seen  # type: ignore[attr-defined]
    return forward


def _closed_over_dict() -> Any:
    notes = {"calls": 0}

    def forward(x: torch.Tensor) -> torch.Tensor:
        notes["calls"] += 1
        return x + notes["calls"]

    forward.watched = notes  # type: ignore[attr-defined]
    return forward


def _closed_over_by_an_inner_function() -> Any:
    seen: list[Any] = []

    def remember(value: Any) -> None:
        seen.append(value)

    def forward(x: torch.Tensor) -> torch.Tensor:
        remember(1)
        return x * len(seen)

    return forward


def _closed_over_by_a_method() -> Any:
    state: dict[str, int] = {"n": 0}

    def forward(x: torch.Tensor) -> torch.Tensor:
        class Helper:
            def touch(self) -> None:
                state["n"] += 1

        Helper().touch()
        return x * state["n"]

    forward.watched = state  # type: ignore[attr-defined]
    return forward


def _closed_over_iterator() -> Any:
    numbers = itertools.count(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * next(numbers)

    return forward


def _closed_over_generator() -> Any:
    def naturals() -> Any:
        number = 0
        while True:
            number += 1
            yield number

    numbers = naturals()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * next(numbers)

    return forward


def _closed_over_tensor_list() -> Any:
    total = [torch.zeros(4)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        total[0] = total[0] + x.detach().sum(0)
        return x + total[0]

    forward.watched = total  # type: ignore[attr-defined]
    return forward


def _closed_over_tensor() -> Any:
    total = torch.zeros(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return x * total

    forward.watched = total  # type: ignore[attr-defined]
    return forward


def _rebound_tensor() -> Any:
    total = torch.zeros(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total = total + 1
        return x * total

    return forward


for _name, _build in {
    "a nonlocal counter": _nonlocal_counter,
    "a list closed over": _closed_over_list,
    "a dict closed over": _closed_over_dict,
    "a list closed over by an inner function": _closed_over_by_an_inner_function,
    "a dict closed over by a method of a local class": _closed_over_by_a_method,
    "an iterator closed over": _closed_over_iterator,
    "a generator closed over": _closed_over_generator,
    "tensors in a list closed over": _closed_over_tensor_list,
    "a tensor closed over and written": _closed_over_tensor,
    "a nonlocal tensor": _rebound_tensor,
}.items():
    TRAPS.add(_name, _build, skip=_NO_COPIES)


def _mutable_default() -> Any:
    def forward(x: torch.Tensor, seen: list[Any] = []) -> torch.Tensor:  # noqa: B006
        seen.append(None)
        return x * len(seen)

    return forward


def _mutable_default_dict() -> Any:
    def forward(x: torch.Tensor, *, notes: dict[str, int] = {}) -> torch.Tensor:  # noqa: B006
        notes["calls"] = notes.get("calls", 0) + 1
        return x * notes["calls"]

    return forward


def _mutable_default_inside() -> Any:
    def scaled(x: torch.Tensor, seen: list[Any] = []) -> torch.Tensor:  # noqa: B006
        seen.append(None)
        return x * len(seen)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return scaled(x) + 1

    return forward


def _tensor_default() -> Any:
    def forward(x: torch.Tensor, total: torch.Tensor = torch.zeros(1)) -> torch.Tensor:  # noqa: B008
        total.add_(1)
        return x * total

    forward.__defaults__[0].zero_()  # type: ignore[index]
    return forward


def _attribute_of_function() -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        forward.calls += 1  # type: ignore[attr-defined]
        return x * forward.calls  # type: ignore[attr-defined]

    forward.calls = 0  # type: ignore[attr-defined]
    return forward


for _name, _build in {
    "a list as a default": _mutable_default,
    "a dict as a keyword default": _mutable_default_dict,
    "a list as a default further inside": _mutable_default_inside,
    "a tensor as a default, written": _tensor_default,
    "a counter on the function itself": _attribute_of_function,
}.items():
    TRAPS.add(_name, _build, skip=_NO_COPIES)


class Stepper:
    """A callable that is no module, and counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.linear = nn.Linear(4, 4)
        self.total = torch.zeros(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls

    def accumulate(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + 1
        return x * self.total

    def write(self, x: torch.Tensor) -> torch.Tensor:
        self.total += 1
        return x * self.total

    @classmethod
    def static(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor

    factor = 2.0


TRAPS.add("a callable object that counts", Stepper, skip=_NO_COPIES)
TRAPS.add("a method of an object that counts", lambda: Stepper().accumulate, skip=_NO_COPIES)
TRAPS.add("a method of an object that writes a tensor", lambda: Stepper().write, skip=_NO_COPIES)
TRAPS.add("a class method", lambda: Stepper.static)
TRAPS.add("a partial of a callable object", lambda: functools.partial(Stepper()), skip=_NO_COPIES)


@TRAPS.model("a helper object that counts", skip=_NO_COPIES)
class HelperObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stepper = Stepper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stepper(x) + 1


class _Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


@TRAPS.model("a counter in an object with slots")
class SlottedCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.notes = _Slotted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.calls += 1
        return x * self.notes.calls


@TRAPS.model("a list on the class")
class ListOnClass(nn.Module):
    items: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        ListOnClass.items.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).items.append(1)
        return x * len(self.items)


class _Registry:
    calls = 0
    table: Counter[str] = Counter()


@TRAPS.model("a counter on another class")
class CounterElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _Registry.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _Registry.calls += 1
        return x * _Registry.calls


@TRAPS.model("a table on another class, reached by a helper")
class TableElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _Registry.table.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * _next_call("calls")


def _next_call(name: str) -> int:
    _Registry.table[name] += 1
    return _Registry.table[name]


_SETTINGS = types.SimpleNamespace(calls=0)
_OTHER: Any = types.ModuleType("settings")
_RECENT: deque[int] = deque(maxlen=3)


@TRAPS.model("a counter in a global object")
class GlobalObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _SETTINGS.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _SETTINGS.calls += 1
        return x * _SETTINGS.calls


@TRAPS.model("a counter in another Python module")
class OtherModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _OTHER.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _OTHER.calls += 1
        return x * _OTHER.calls


@TRAPS.model("a global deque that forgets")
class GlobalDeque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _RECENT.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _RECENT.append(len(_RECENT) + 1)
        return x * sum(_RECENT)


@functools.lru_cache(maxsize=8)
def _half(n: int) -> int:
    return n // 2 + 1


@TRAPS.function("a cached number returned")
def cached_number(x: torch.Tensor) -> Any:
    return x * 2, _half(x.shape[0])


@functools.cache
def _positions(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(n, dtype=dtype).unsqueeze(1)


@TRAPS.function("a cached table by size and dtype")
def cached_table(x: torch.Tensor) -> torch.Tensor:
    return x + _positions(x.size(0), x.dtype)


def _fresh_cached_mask() -> Any:
    _mask.cache_clear()
    return cached_mask


@functools.lru_cache
def _mask(n: int, device: torch.device) -> torch.Tensor:
    return torch.ones(n, n, device=device).tril()


def cached_mask(x: torch.Tensor) -> torch.Tensor:
    return _mask(x.shape[0], x.device).to(x.dtype) @ x


TRAPS.add("a cached mask by size and device", _fresh_cached_mask, devices=True)


@functools.lru_cache
def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x / (x.abs().sum() + 1)


@TRAPS.model("a function of a tensor in a cache")
class CachedTensorFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        _normalised.cache_clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * _normalised(self.weight.detach()) + _normalised(x)


@TRAPS.model("a cached property")
class CachedProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    @functools.cached_property
    def scale(self) -> torch.Tensor:
        return self.weight.detach().abs().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@TRAPS.model("a weak dictionary keyed by tensors")
class WeakTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Any = weakref.WeakValueDictionary()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        self.table["last"] = y
        return self.table["last"] + 1


@TRAPS.model("a dictionary keyed by tensors")
class KeyedByTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.scales = {self.weight: 3.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local = {x: 2.0}
        return x * self.scales[self.weight] * local.get(x, 5.0) * local.get(self.weight, 7.0)


@TRAPS.model("a submodule swapped in forward")
class SubmoduleSwapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first, self.second = self.second, self.first
        return self.first(x)


@TRAPS.model("layers moved round in forward")
class LayersRotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers.append(self.layers.pop(0))
        return self.layers[0](x)


@TRAPS.model("a layer's settings changed in forward")
class SettingsChanged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.eps = self.norm.eps * 10 + 0.1
        return self.norm(x)


@TRAPS.model("a dropout rate that grows")
class RateGrows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drop.p = min(0.9, self.drop.p + 0.3)
        return self.drop(x)


@TRAPS.model("a name written through the dict of a module")
class WrittenThroughDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vars(self)["calls"] += 1
        object.__setattr__(self, "calls", self.calls + 1)
        return x * self.calls


@TRAPS.model("tensors made of one another")
class TensorsSwapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.utils.swap_tensors(self.weight, nn.Parameter(self.weight.detach() * 2))
        return x * self.weight.detach()


@TRAPS.model("a layer cast in forward")
class CastInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear.double()(x.double())
        self.linear.float()
        return y


@TRAPS.model("weights loaded in forward")
class LoadedInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.second.load_state_dict({key: value * 0.5 for key, value in self.first.state_dict().items()})
        return self.second(x)


@TRAPS.model("a buffer removed and registered again")
class RegisteredAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.table
        del self.table
        self.register_buffer("table", before + 1)
        return x + self.table
