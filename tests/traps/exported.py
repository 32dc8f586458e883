"""Traps: what programs that come from torch's own tracers lose: facts about inputs and torch, the order and names of arguments,
writes that are no operators, gradients made on the way, results that are inputs.
"""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.traps.trap import Call, Collection, matrix

TRAPS = Collection()
_NO_COPIES = frozenset({"deep copy", "pickled"})


def _with(change: Any) -> Any:
    return lambda: change(matrix())


def _parameter() -> nn.Parameter:
    return nn.Parameter(matrix())


def _transposed() -> torch.Tensor:
    return torch.randn(4, 3).t()


def _gradient() -> torch.Tensor:
    return matrix().requires_grad_()


def _not_leaf() -> torch.Tensor:
    return matrix().requires_grad_() * 1


def _sliced() -> torch.Tensor:
    return torch.randn(3, 8)[:, 2:6]


# ---- facts about inputs ----


@TRAPS.function("a parameter by isinstance", others={"parameter": _parameter})
def is_parameter(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if isinstance(x, nn.Parameter) else x + 1


@TRAPS.function("a parameter by its type", others={"parameter": _parameter})
def type_is_parameter(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if type(x) is nn.Parameter else x + 1


@TRAPS.function("a parameter matched", others={"parameter": _parameter})
def matched_parameter(x: torch.Tensor) -> torch.Tensor:
    match x:
        case nn.Parameter():
            return x * 2
        case _:
            return x + 1


@TRAPS.function("a leaf or not", others={"gradient": _gradient, "no leaf": _not_leaf})
def leaf_or_not(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_leaf else x + 1


@TRAPS.function("a history or not", others={"gradient": _gradient, "no leaf": _not_leaf})
def history_or_not(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.grad_fn is None else x + 1


@TRAPS.function("the fact of an intermediate", others={"transposed": _transposed, "sliced": _sliced})
def fact_of_intermediate(x: torch.Tensor) -> torch.Tensor:
    y = x.t()
    return y * 2 if y.is_contiguous() else y + 1


@TRAPS.function("how far the steps are", others={"transposed": _transposed, "sliced": _sliced})
def steps_between(x: torch.Tensor) -> torch.Tensor:
    return x * x.stride(0) + x.storage_offset()


@TRAPS.function("as strided by its own strides", others={"transposed": _transposed})
def by_own_strides(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x, (2, 2), x.stride()) + 1


@TRAPS.function("contiguous where it has to be", others={"transposed": _transposed, "sliced": _sliced})
def contiguous_first(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1)


@TRAPS.function("reshaped and written", others={"transposed": _transposed, "sliced": _sliced}, sizes=(5,))
def reshaped_and_written(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1)
    flat.add_(1)
    return x * 2


@TRAPS.function("the number of writes so far", others={"written": _with(lambda x: x.add_(1))})
def writes_so_far(x: torch.Tensor) -> torch.Tensor:
    return x * (x._version + 1)


@TRAPS.function("an attribute with a default", others={"scale": _with(lambda x: _tagged(x))})
def attribute_with_default(x: Any) -> torch.Tensor:
    return x * getattr(x, "scale", 1.0)


def _tagged(x: Any) -> torch.Tensor:
    x.scale = 3.0
    return x


@TRAPS.function(
    "a tensor or a number", others={"number": lambda: (matrix(), 2.0), "tensor": lambda: (matrix(), torch.tensor(2.0))}
)
def tensor_or_number(x: torch.Tensor, y: Any = None) -> torch.Tensor:
    if y is None:
        return x
    return x * y if isinstance(y, torch.Tensor) else x + y


@TRAPS.function(
    "a mapping of some kind",
    inputs=lambda n: {"a": matrix(n)},
    others={"ordered": lambda: collections.OrderedDict(a=matrix())},
)
def mapping_of_kind(x: Any) -> torch.Tensor:
    return x["a"] * 2 if type(x) is dict else x["a"] + 1


@TRAPS.function(
    "the same tensor twice", inputs=lambda n: (matrix(n), matrix(n)), others={"twice": lambda: (matrix(),) * 2}
)
def same_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 5 if x is y else x + y


@TRAPS.function(
    "inputs that overlap", inputs=lambda n: (matrix(n), matrix(n)), others={"overlapping": lambda: _overlapping()}
)
def overlapping_inputs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x + y


def _overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 4)
    return x[:3], x[1:]


# ---- facts about torch ----


@TRAPS.function("gradients on or off")
def gradients_on(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.is_grad_enabled() else x + 1


@TRAPS.function("gradients switched on")
def switched_on(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x * 2
    return y


@TRAPS.function("gradients set by the input", others={"gradient": _gradient})
def set_by_input(x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(x.requires_grad):
        return x * 2


@TRAPS.function("autocast on a CPU asked")
def autocast_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.is_autocast_enabled("cpu") else x + 1


@TRAPS.function("the default type asked")
def default_type_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.get_default_dtype() is torch.float32 else x + 1


@TRAPS.function("the default type set")
def default_type_set(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    y = x + torch.ones(4)
    torch.set_default_dtype(torch.float32)
    return y


@TRAPS.function("determinism asked")
def determinism_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.are_deterministic_algorithms_enabled() else x + 1


# ---- arguments ----


@TRAPS.function(
    "keywords in another order than the signature's",
    inputs=lambda n: Call((matrix(n),), {"b": matrix(n), "a": matrix(n) + 5}),
    others={"by position": lambda: (matrix(), matrix(), matrix() * 3)},
)
def in_another_order(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x + 2 * a - 3 * b


@TRAPS.function(
    "a default in the middle left out",
    inputs=lambda n: Call((matrix(n),), {"b": matrix(n)}),
    others={"by position": lambda: (matrix(), matrix())},
)
def default_in_the_middle(x: torch.Tensor, a: Any = 1, b: Any = 1) -> torch.Tensor:
    return x + 2 * a - 3 * b


@TRAPS.function(
    "keywords walked over",
    inputs=lambda n: Call((matrix(n),), {"a": matrix(n), "b": matrix(n)}),
    others={
        "turned round": lambda: Call((matrix(),), {"b": matrix(), "a": matrix()}),
        "more": lambda: Call((matrix(),), {"b": matrix(), "a": matrix(), "c": matrix()}),
        "none": lambda: Call((matrix(),), {}),
    },
)
def keywords_walked_over(x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    for value in others.values():
        x = x * 2 + value
    return x


@TRAPS.function(
    "a dict in another order",
    inputs=lambda n: {"a": matrix(n), "b": matrix(n)},
    others={"turned round": lambda: {"b": matrix(), "a": matrix()}},
)
def dict_in_another_order(x: dict[str, torch.Tensor]) -> torch.Tensor:
    result = torch.zeros(())
    for value in x.values():
        result = result * 2 + value
    return result


@TRAPS.function(
    "more or fewer", inputs=lambda n: (matrix(n), matrix(n)), others={"one": matrix, "three": lambda: (matrix(),) * 3}
)
def more_or_fewer(*values: torch.Tensor) -> torch.Tensor:
    return sum(values) / len(values)  # type: ignore[return-value]


@TRAPS.function("a number that is a flag", inputs=lambda n: (matrix(n), 1), others={"flag": lambda: (matrix(), True)})
def number_or_flag(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x + 1 if k is True else x * 3


# ---- writes ----


@TRAPS.function("a tensor put on the input")
def put_on_input(x: Any) -> torch.Tensor:
    x.twice = x * 2
    return x.twice + 1


@TRAPS.model("a mark on a parameter")
class MarkOnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.seen = True  # type: ignore[attr-defined]
        return x * self.weight


@TRAPS.model("a parameter written in place")
class ParameterWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight


@TRAPS.model("the data of a parameter swapped")
class DataSwapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * 0.5
        return x * self.weight


@TRAPS.model("a buffer that grows")
class GrowingBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach()])
        return x + self.seen.shape[0]


@TRAPS.model("a buffer resized")
class ResizedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.resize_(self.seen.shape[0] + 1).fill_(1.0)
        return x * self.seen.sum()


@TRAPS.model("a buffer registered late", skip=_NO_COPIES)
class RegisteredLate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().sum(0))
        return x + self.first


@TRAPS.model("averages in a dict")
class AveragesInDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.averages = {"mean": torch.zeros(4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.averages["mean"] = self.averages["mean"] * 0.9 + x.detach().mean(0) * 0.1
        return x - self.averages["mean"]


class _Average:
    def __init__(self) -> None:
        self.value = torch.zeros(4)

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.value.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.value


@TRAPS.model("averages in an object")
class AveragesInObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.average = _Average()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.average.update(x)


@TRAPS.function("a view of the input written")
def view_written(x: torch.Tensor) -> torch.Tensor:
    x[:, 0].zero_()
    return x * 2


@TRAPS.function("a copy that is none", others={"double": lambda: matrix().double()})
def copy_or_not(x: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.float32)
    y.add_(1)
    return y * 2


# ---- optimisers and gradients ----


class _Learner(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.optimiser = kind([self.weight], **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.optimiser.zero_grad()
        with torch.enable_grad():
            (x.detach() * self.weight).pow(2).sum().backward()
        self.optimiser.step()
        return x * self.weight.detach()


TRAPS.add(
    "a model that learns by momentum",
    functools.partial(_Learner, torch.optim.SGD, lr=0.1, momentum=0.9),
    skip=_NO_COPIES,
)
TRAPS.add("a model that learns by Adam", functools.partial(_Learner, torch.optim.Adam, lr=0.1), skip=_NO_COPIES)


@TRAPS.model("a step without gradients of its own", skip=_NO_COPIES)
class StepOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.optimiser = torch.optim.SGD([self.weight], lr=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.optimiser.step()
        return x * self.weight


@TRAPS.model("gradients looked at")
class GradientsLookedAt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return y if self.weight.grad is None else y + self.weight.grad.norm().detach()


@TRAPS.function("a gradient of the input inside", others={"gradient": _gradient})
def gradient_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), y)
    return x + gradient


@TRAPS.function("a leaf made on the way")
def leaf_made(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_() * 2


@TRAPS.function("checkpointed", others={"gradient": _gradient})
def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False)


@TRAPS.model("two layers with one weight")
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


class _Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()


@TRAPS.model("a parametrised weight", skip=_NO_COPIES)
class Parametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        parametrize.register_parametrization(self.linear, "weight", _Symmetric())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@TRAPS.model("a parametrised weight kept", skip=_NO_COPIES)
class ParametrisedCached(Parametrised):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return self.linear(x) + self.linear(x * 2)


# ---- results ----


@TRAPS.function("nothing but the input returned")
def input_returned(x: torch.Tensor) -> torch.Tensor:
    return x


@TRAPS.function("the input and a view of it")
def input_and_view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x[1:]


@TRAPS.function("one result twice")
def one_result_twice(x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = x * 2
    return {"a": y, "b": y}


@TRAPS.function("sizes returned")
def sizes_returned(x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Size, str]:
    return x + 1, x.shape[0], x.shape, f"{len(x)} rows"


@TRAPS.function("facts returned", others={"gradient": _gradient, "transposed": _transposed})
def facts_returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.dtype, bool, bool]:
    return x + 1, x.dtype, x.requires_grad, x.is_contiguous()


@TRAPS.model("a buffer returned")
class BufferReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        return x * 2, self.count


@dataclass
class _Result:
    value: torch.Tensor
    rows: int


@TRAPS.function("a dataclass returned")
def dataclass_returned(x: torch.Tensor) -> _Result:
    return _Result(x * 2, len(x))


# ---- other things ----


@TRAPS.function("a mark that is remembered", skip=_NO_COPIES)
def remembered(x: torch.Tensor) -> torch.Tensor:
    return x + _table(x.shape[1])


@functools.lru_cache
def _table(n: int) -> torch.Tensor:
    return torch.arange(float(n))


@TRAPS.function("an error of an operator survived", others={"transposed": _transposed, "sliced": _sliced})
def error_survived(x: torch.Tensor) -> torch.Tensor:
    try:
        return x.view(-1) * 2
    except RuntimeError:
        return x.reshape(-1) + 1


@TRAPS.function(
    "an error of values survived", inputs=lambda n: torch.eye(n) * 2, others={"not positive": lambda: -torch.eye(3)}
)
def error_of_values(x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.linalg.cholesky(x)
    except RuntimeError:
        return x * 0


@TRAPS.model("a mode of its own making")
class OwnMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 1.0

    def train(self, mode: bool = True) -> OwnMode:
        self.rate = 2.0 if mode else 1.0
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rate


@TRAPS.function("a shift that rounds", others={"integers": lambda: torch.ones(3, 4, dtype=torch.int64)})
def shift_by_type(x: torch.Tensor) -> torch.Tensor:
    return x / 2 if x.is_floating_point() else x // 2


@TRAPS.function("complex or not", others={"complex": lambda: torch.randn(3, 4, dtype=torch.complex64)})
def complex_or_not(x: torch.Tensor) -> torch.Tensor:
    return x.abs() if x.is_complex() else x.relu()


@TRAPS.function("sparse or not", others={"sparse": lambda: matrix().to_sparse()})
def sparse_or_not(x: torch.Tensor) -> torch.Tensor:
    return x.to_dense() * 2 if x.is_sparse else x + 1


@TRAPS.function("dropped with a seed inside")
def seeded_inside(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.5)


@TRAPS.function("drawn by a generator made inside")
def generator_inside(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return x + torch.rand(4, generator=generator)


@TRAPS.function("drawn beside the state")
def beside_the_state(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        noise = torch.rand(4)
    return x + noise
