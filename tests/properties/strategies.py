"""The grammar of random programs: straight-line forwards, written as source text so that a failing one reads as a program.
Statements are functions over a `Writer`; what they may mention besides torch is in `parts.py`.
"""

from __future__ import annotations

import itertools
import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.properties import parts

_numbers = itertools.count()

# Statements and forms that capture gets wrong today; each is a failing example in test_found_programs.py. Empty it as they
# are mended.
NOT_YET: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Program:
    """A random program: the lines of a forward over `x` and `y`, for a model in training mode or not."""

    lines: tuple[str, ...]
    training: bool
    is_function: bool
    seed: int

    @property
    def source(self) -> str:
        """The program as Python text."""
        body = "\n".join(f"    {line}" for line in self.lines)
        if self.is_function:
            return f"def program(x, y):\n{body}\n"
        inner = "\n".join(f"        {line}" for line in self.lines)
        return f"class Program(Parts):\n    def forward(self, x, y):\n{inner}\n"

    def make(self) -> tuple[Any, nn.Module]:
        """What to trace and run, and the module that holds its state."""
        filename = f"<random program {next(_numbers)}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        scope: dict[str, Any] = {"torch": torch, "F": functional, "nn": nn, "random": random, "parts": parts}
        scope |= {name: getattr(parts, name) for name in ("Parts", "Pair", "helper", "frozen_helper", "Cube")}
        scope["__name__"] = __name__
        exec(compile(self.source, filename, "exec"), scope)
        if self.is_function:
            return scope["program"], nn.Module()
        model = scope["Program"]().train(self.training)
        return model, model

    def __repr__(self) -> str:
        mode = "training" if self.training else "evaluation"
        return f"<in {mode} mode, seed {self.seed}>\n{self.source}"


class Value(NamedTuple):
    """A variable of the program: `leaf` is or views an input that needs a gradient, `low` may be of low precision."""

    name: str
    shape: tuple[int, ...]
    leaf: bool = False
    low: bool = False


class Writer:
    """A program being written, and what it may refer to."""

    def __init__(self, draw: Callable[..., Any], is_function: bool) -> None:
        self.draw = draw
        self.is_function = is_function
        self.lines: list[str] = []
        self.values = [Value("x", (2, 3), leaf=True), Value("y", (2, 3))]
        self.sizes: list[str] = ["2"]
        self.regions: list[str] = []
        self._count = 0

    def write(self, text: str) -> None:
        """One more line."""
        self.lines.append("    " * len(self.regions) + text)

    def pick(self, *choices: Any) -> Any:
        """One of the choices."""
        allowed = [item for item in choices if (item[0] if isinstance(item, tuple) else item) not in NOT_YET]
        return self.draw(st.sampled_from(allowed))

    def value(self, fits: Callable[[Value], bool] = lambda value: True) -> Value | None:
        """A variable, mostly one of the latest."""
        found = [value for value in self.values if fits(value)]
        if not found:
            return None
        return found[-1 - self.draw(st.integers(0, len(found) - 1))]

    def writable(self) -> Value | None:
        """A variable that may be written in place."""
        without_gradient = "no_grad" in self.regions
        return self.value(lambda value: without_gradient or not value.leaf)

    def fitting(self, shape: tuple[int, ...]) -> str:
        """An expression that can be broadcast to `shape`."""
        other = self.value(lambda value: _broadcasts(value.shape, shape))
        return other.name if other is not None and self.draw(st.integers(0, 3)) else self.pick("0.5", "2", "-1.25")

    def assign(
        self, text: str, shape: tuple[int, ...], *sources: Value, view: bool = False, low: bool = False
    ) -> Value:
        """`name = text`, as a new variable."""
        self._count += 1
        low = low or "autocast" in self.regions or any(source.low for source in sources)
        value = Value(f"v{self._count}", shape, view and any(source.leaf for source in sources), low)
        self.write(f"{value.name} = {text}")
        self.values.append(value)
        return value


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


# ---- computing ----


def elementwise(w: Writer) -> None:
    a = w.value()
    form = w.pick(
        "torch.tanh({0})", "{0}.sigmoid()", "F.relu({0})", "-{0}", "{0} * 0.5", "1 - {0}", "{0}.abs()", "helper({0})", "{0} ** 2",
        "torch.where({0} > 0, {0}, 0.1)", "{0}.clamp(min=-1, max=1)", "torch.nn.functional.gelu({0})", "{0}.clone()",
        "F.leaky_relu({0}, negative_slope=0.1)", "helper({0}, amount=2)", "parts.leaf_function({0})", "Cube.apply({0})",
        "torch.stack([{0}, {0}]).sum(0)", "torch.softmax({0}.reshape(-1), 0).sum() * {0}", "frozen_helper({0})", "{0} / 2",
    )  # fmt: skip
    w.assign(form.format(a.name), a.shape, a)


def binary(w: Writer) -> None:
    a = w.value()
    other = w.fitting(a.shape)
    forms = ["{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.add({0}, {1})", "torch.mul({0}, {1})"]
    if not other[0].isdigit() and other[0] != "-":
        forms += ["torch.add({0}, {1}, alpha=2)", "torch.maximum({0}, {1})", "torch.lerp({0}, {1} + 0 * {0}, 0.25)"]
        forms += ["torch.cat([{0}, {1} + 0 * {0}]).chunk(2)[1]"] if a.shape else []
    low = any(value.low for value in w.values)
    w.assign(w.pick(*forms).format(a.name, other), a.shape, a, low=low)


def matmul(w: Writer) -> None:
    autocast = "autocast" in w.regions
    a = w.value(lambda value: len(value.shape) == 2 and (autocast or not value.low))
    form = w.pick("{0} @ {0}.t()", "torch.mm({0}, {0}.transpose(0, 1))", "torch.einsum('ij,kj->ik', {0}, {0})")
    w.assign(form.format(a.name), (a.shape[0], a.shape[0]), a)


def reduction(w: Writer) -> None:
    a = w.value(lambda value: len(value.shape) == 2)
    rows, columns = a.shape
    text, shape = w.pick(
        ("{0}.sum()", ()), ("{0}.mean(0)", (columns,)), ("torch.amax({0}, -1)", (rows,)), ("torch.norm({0} + 1)", ()),
        ("{0}.sum(dim=-1, keepdim=True)", (rows, 1)), ("{0}.var(0, unbiased=False)", (columns,)), ("{0}.cumsum(0)", a.shape),
        ("F.softmax({0}, dim=-1)", a.shape), ("F.layer_norm({0}, {0}.shape[1:])", a.shape),
    )  # fmt: skip
    w.assign(text.format(a.name), shape, a)


def unpacking(w: Writer) -> None:
    a = w.value(lambda value: len(value.shape) == 2 and value.shape[0] == 2)
    if a is None:
        return
    form, shape, view = w.pick(
        ("{0}.chunk(2)", (1, a.shape[1]), True), ("{0}.unbind(0)", a.shape[1:], True), ("{0}.split(1)", (1, a.shape[1]), True),
        ("torch.max({0}, dim=0)", a.shape[1:], False), ("torch.var_mean({0}, dim=0)", a.shape[1:], False),
        ("{0}.topk(1, dim=0)", (1, a.shape[1]), False), ("{0}.sort(0)", a.shape, False), ("{0}", a.shape[1:], True),
    )  # fmt: skip
    w._count += 1
    name = f"v{w._count}"
    w.write(f"{name}, {name}_rest = {form.format(a.name)}")
    w.values.append(Value(name, shape, view and a.leaf, a.low or "autocast" in w.regions))


# ---- views and writing ----


def view(w: Writer) -> None:
    a = w.value(lambda value: len(value.shape) == 2)
    rows, columns = a.shape
    text, shape = w.pick(
        ("{0}.reshape(-1)", (rows * columns,)), ("{0}.transpose(0, 1)", (columns, rows)), ("{0}.t()", (columns, rows)),
        ("{0}[0]", (columns,)), ("{0}[:, -1:]", (rows, 1)), ("{0}[..., 0]", (rows,)), ("{0}[None]", (1, rows, columns)),
        ("{0}.unsqueeze(-1)", (rows, columns, 1)), ("{0}.flatten()", (rows * columns,)), ("{0}.T", (columns, rows)),
        ("{0}.narrow(0, 0, 1)", (1, columns)), ("{0}.contiguous()", a.shape), ("{0}.detach()", a.shape), ("{0}[:]", a.shape),
        ("{0}.view_as({0})", a.shape), ("torch.permute({0}, (1, 0))", (columns, rows)), ("{0}.select(1, 0)", (rows,)),
        ("{0}.data", a.shape), ("torch.atleast_2d({0})", a.shape), ("torch.einsum('ij->ji', {0})", (columns, rows)),
        ("{0}.type_as({0})", a.shape), ("{0}.float()", a.shape), ("{0}.to({0}.dtype)", a.shape), ("{0}.squeeze(2 - 3)", None),
        ("{0}.expand_as({0})", a.shape), ("{0}.reshape({0}.shape)", a.shape), ("{0}.real", a.shape), ("+{0}", a.shape),
        ("F.dropout({0}, 0.5, False)", a.shape),
    )  # fmt: skip
    if shape is None:
        shape = (rows,) if columns == 1 else a.shape
    w.assign(text.format(a.name), shape, a, view=True)


def write_operator(w: Writer) -> None:
    a = w.writable()
    if a is None:
        return
    other = w.fitting(a.shape)
    w.write(f"{a.name} {w.pick('+=', '-=', '*=', '/=')} {other if other not in ('0', '0.0') else '2'}")


def write_method(w: Writer) -> None:
    a = w.writable()
    if a is None:
        return
    form = w.pick(
        "{0}.mul_({1})", "{0}.add_({1})", "{0}.copy_({1} + 0 * {0})", "{0}.clamp_(-1, 1)", "torch.relu_({0})", "{0}.zero_()",
        "F.relu({0}, inplace=True)", "{0}.fill_(0.25)", "{0}.masked_fill_({0} > 0, 0.5)", "parts.leaf_write({0})", "{0}.neg_()",
        "F.leaky_relu_({0}, 0.2)", "{0}.sub_({1}).mul_(2)",
    )  # fmt: skip
    statement = form.format(a.name, w.fitting(a.shape))
    if w.pick(True, False):
        w.write(statement)
    elif not statement.startswith("parts."):
        w.assign(statement, a.shape, a, view=True)


def write_item(w: Writer) -> None:
    fits = (lambda v: v.shape) if "no_grad" in w.regions else (lambda v: v.shape and not v.leaf)
    a = w.value(fits)
    if a is None:
        return
    other = w.fitting(a.shape[1:])
    name, last = a.name, a.shape[-1] - 1
    w.write(
        w.pick(
            f"{name}[0] = {other}", f"{name}[..., {last}] = 1.5", f"{name}[0] += {other}", f"{name}[:1] *= 0.5",
            f"{name}[{name} > 0] = 0.25", f"{name}[0].mul_(2)",
            f"{name}[:, None] = 0.5" if len(a.shape) > 1 else f"{name}[:] = 1",
        )
    )  # fmt: skip


def write_through_alias(w: Writer) -> None:
    """A value that may or may not share memory with another is written at once, while the other is still looked at."""
    before = len(w.values)
    view(w)
    made = w.values[before]
    if not made.leaf or "no_grad" in w.regions:
        w.write(f"{made.name} {w.pick('+=', '*=')} {w.fitting(made.shape)}")


def write_low_precision(w: Writer) -> None:
    """In-place operators keep the type of what they write; plain ones would not."""
    a = w.value()
    made = w.assign(w.pick("{0}.half() * 2", "{0}.to(torch.bfloat16) + 1").format(a.name), a.shape, low=True)
    w.write(f"{made.name} {w.pick('+=', '-=', '*=')} {w.fitting(a.shape)}")
    w.assign(f"{made.name}.float()", a.shape)


# ---- the model ----


def module(w: Writer) -> None:
    autocast = "autocast" in w.regions
    a = w.value(lambda value: len(value.shape) == 2 and value.shape[-1] == 3 and (autocast or not value.low))
    names = ["linear", "norm", "drop", "sequence", "alias"]
    if a.shape[0] > 1:
        names += ["batch_norm", "residual"]
    name = w.pick(*names)
    result = w.assign(f"self.{name}({a.name})", a.shape, a, view=name == "drop")
    if w.pick(True, False, False):
        w.assign(f"self.{name}({result.name}) + {a.name}" if not result.low else f"{result.name} + 1", a.shape, result)


def module_in_place(w: Writer) -> None:
    a = w.writable()
    if a is not None:
        w.assign(f"self.relu({a.name})", a.shape, a, view=True)


def buffer(w: Writer) -> None:
    a = w.value(lambda value: value.shape and value.shape[-1] == 3)
    form = w.pick(
        "{0} * self.memory", "{0} + self.memory.sum()", "{0} * self.scale", "{0} + self.offset", "{0} - self.memory[0]",
        "{0} * self.memory.shape[0]", "{0} * self.factor", "{0} + self.count", "{0} * self.memory.clone().sigmoid_()",
        "torch.where(self.memory > 0, {0}, {0} * 2)", "F.linear({0}, self.linear.weight)", "{0} * self.memory.view(1, 3)[0]",
    )  # fmt: skip
    if "F.linear" in form and a.low and "autocast" not in w.regions:
        return
    w.assign(form.format(a.name), a.shape, a)


def buffer_write(w: Writer) -> None:
    a = w.value(lambda value: value.shape == (3,) or value.shape == (1, 3))
    other = (
        f"{a.name}.detach().reshape(3)"
        if a is not None and w.pick(True, False)
        else w.pick("0.5", "y[0]", "self.offset")
    )
    form = w.pick(
        "self.memory.add_({0})", "self.memory.mul_(0.9)", "self.count.add_(1)", "self.memory.copy_(self.memory * {0})",
        "self.memory[:2].add_(1)", "torch.add(self.memory, 1, out=self.memory)", "self.memory[0] = {1}[0]",
        "self.memory[1] = 2.5",
        "self.memory[:] = self.memory + {0}", "F.relu(self.memory, inplace=True)", "self.offset.mul_(1.5)",
        "self.memory.data.add_({0})",
    )  # fmt: skip
    tensor = other if not other[0].isdigit() else "self.offset"
    if form.startswith("F.relu") or form.endswith("+ {0}"):
        other = tensor
    w.write(form.format(other, tensor))


def buffer_alias(w: Writer) -> None:
    w.assign(w.pick("self.memory", "self.memory[:]", "self.memory.view(3)", "self.offset"), (3,))


def parameter_write(w: Writer) -> None:
    w.write("with torch.no_grad():")
    w.write(w.pick("    self.scale.mul_(0.75)", "    self.linear.weight.data.add_(0.125)", "    self.scale[0] = 0.5"))


# ---- numbers, constants and chance ----


def constant(w: Writer) -> None:
    text, shape = w.pick(
        ("torch.zeros(3)", (3,)), ("torch.ones(2, 3)", (2, 3)), ("torch.arange(3.)", (3,)), ("torch.full((3,), 0.5)", (3,)),
        ("torch.tensor([1., -2., 3.])", (3,)), ("torch.eye(3)", (3, 3)), ("torch.linspace(0, 1, 3)", (3,)),
        ("torch.tensor(0.5)", ()), ("torch.empty(3).fill_(2.)", (3,)), ("torch.ones(3).view(1, 3)", (1, 3)),
        ("torch.tensor([0, 1, 2]).float()", (3,)), ("torch.zeros(y.shape[0], 3)", (2, 3)), ("torch.zeros_like(y)", (2, 3)),
        ("y.new_ones(3)", (3,)), ("torch.ones(y.size())", (2, 3)), ("torch.full((3,), float('inf')).clamp(max=1)", (3,)),
        ("torch.ones(3)[torch.tensor([0, 2, 1])]", (3,)), ("torch.ones(2, 3).t().contiguous().t()", (2, 3)),
    )  # fmt: skip
    w.assign(text, shape)


def constant_write(w: Writer) -> None:
    """A tensor made of constants alone, written into before anything traced meets it."""
    made = w.assign(w.pick("torch.zeros(2, 3)", "torch.ones(2, 3)", "torch.arange(6.).reshape(2, 3)"), (2, 3))
    form = w.pick(
        "{0}[0] = 5", "{0}[:, 1] = torch.tensor([7., 8.])", "{0}[0].add_(3)", "{0}.add_(2)", "{0}[1] += 1", "{0}.t()[0].fill_(4)",
        "torch.add({0}, 1, out={0})", "F.relu({0}.sub_(0.5), inplace=True)", "{0}.copy_(torch.full((2, 3), 0.5))",
        "{0}[0] = self.memory", "{0}[0, 0] = y[0, 0]", "{0}.view(-1)[2:4] = -1",
    )  # fmt: skip
    w.write(form.format(made.name).replace("self.memory", "y[1]" if w.is_function else "self.memory"))


def chance(w: Writer) -> None:
    text, shape = w.pick(
        ("torch.rand(3)", (3,)), ("torch.rand_like(y)", (2, 3)), ("F.dropout(y, 0.5)", (2, 3)), ("torch.randn(y.shape)", (2, 3)),
        ("torch.bernoulli(torch.full((3,), 0.5))", (3,)), ("torch.randn(y.size(0), 3)", (2, 3)), ("y * random.random()", (2, 3)),
        ("torch.empty(3).uniform_()", (3,)), ("torch.randint(0, 3, (3,)).float()", (3,)), ("torch.zeros(3).normal_()", (3,)),
        ("y[:, torch.randperm(3)]", (2, 3)), ("torch.normal(torch.zeros(3), 1.)", (3,)), ("y + random.uniform(0, 1)", (2, 3)),
        ("torch.multinomial(torch.ones(4), 3).float()", (3,)), ("F.dropout(torch.ones(3), 0.5)", (3,)),
    )  # fmt: skip
    if not w.is_function and w.pick(True, False, False):
        text, shape = w.pick(
            ("F.dropout(y, 0.5, self.training)", (2, 3)), ("F.dropout(self.memory, 0.5)", (3,)),
            ("torch.rand_like(self.memory)", (3,)), ("y if self.training else y * 2", (2, 3)),
        )  # fmt: skip
    w.assign(text, shape)


def chance_unused(w: Writer) -> None:
    w.write(w.pick("torch.rand(2)", "torch.randn(1, 2)", "random.random()", "y.clone().normal_()", "F.dropout(y, 0.3)"))


def size(w: Writer) -> None:
    a = w.value(lambda value: value.shape)
    number = w.pick(*w.sizes)
    form = w.pick(
        "{0}.shape[0]",
        "{0}.size(-1)",
        "{0}.numel()",
        "{0}.shape[-1] + {1}",
        "{0}.size(0) * 2 - 1",
        "{0}.dim()",
        "len(({0}, 1))",
    )
    w._count += 1
    w.write(f"n{w._count} = {form.format(a.name, number)}")
    w.sizes.append(f"n{w._count}")


def size_use(w: Writer) -> None:
    a = w.value(lambda value: len(value.shape) == 2)
    number = w.pick(*w.sizes)
    text, shape, is_view = w.pick(
        ("{0} * {1}", a.shape, False), ("{0} + torch.zeros({1}).sum()", a.shape, False), ("{0} / ({1} + 1)", a.shape, False),
        ("{0}[: {0}.shape[0] // 2 + 1]", (a.shape[0] // 2 + 1, a.shape[1]), True),
        ("{0}.reshape({0}.size(1), {0}.size(0))", a.shape[::-1], True),
        ("{0}.reshape({0}.shape[0] * {0}.shape[1])", (a.shape[0] * a.shape[1],), True),
        ("{0}.view_as({0}).expand(*({0}.shape[0], {0}.shape[1]))", a.shape, True),
    )  # fmt: skip
    w.assign(text.format(a.name, number), shape, a, view=is_view)


# ---- regions ----

_REGIONS = {
    "no_grad": "with torch.no_grad():",
    "enable_grad": "with torch.enable_grad():",
    "set_grad": "with torch.set_grad_enabled(False):",
    "autocast": "with torch.autocast('cpu', dtype=torch.bfloat16):",
}


def region(w: Writer) -> None:
    if len(w.regions) > 1:
        return
    name = w.pick(*_REGIONS)
    w.write(_REGIONS[name])
    w.regions.append("no_grad" if name == "set_grad" else name)
    before = len(w.lines)
    for _ in range(w.draw(st.integers(1, 3))):
        statement(w)
    if len(w.lines) == before:
        w.write("pass")
    w.regions.pop()


# ---- programs ----

_ANYWHERE = (
    elementwise,
    binary,
    matmul,
    reduction,
    unpacking,
    view,
    view,
    write_operator,
    write_operator,
    write_method,
)
_ANYWHERE += (
    write_through_alias,
    write_low_precision,
    write_item,
    constant,
    constant_write,
    chance,
    chance_unused,
    size,
    size_use,
    region,
)
_IN_MODELS = (
    *_ANYWHERE,
    module,
    module,
    module_in_place,
    buffer,
    buffer_write,
    buffer_write,
    buffer_alias,
    parameter_write,
)


def statement(w: Writer) -> None:
    """Write one random statement (or none, where the one drawn does not fit)."""
    kinds = [kind for kind in (_ANYWHERE if w.is_function else _IN_MODELS) if kind.__name__ not in NOT_YET]
    w.draw(st.sampled_from(kinds))(w)


def _result(w: Writer) -> None:
    names = [w.value().name for _ in range(w.draw(st.integers(1, 3)))]
    first, last = names[0], names[-1]
    w.write(
        "return "
        + w.pick(
            first, f"({', '.join(names)},)", f"[{', '.join(names)}]", f"{{'a': {first}, 'b': [{last}, 2]}}",
            f"({first}, None, 1.5)",
            f"Pair({first}, {last})", f"({first}, {first}, ({last}, {{'size': {last}.shape}}))",
            first if w.is_function else f"({first}, self.memory)", f"{first} + x.sum()", f"({first} * x[0, 0], {last})",
        )
    )  # fmt: skip


@st.composite
def programs(draw: Callable[..., Any], is_function: bool | None = None) -> Program:
    """A random program."""
    function = draw(st.booleans()) if is_function is None else is_function
    writer = Writer(draw, function)
    for _ in range(draw(st.integers(1, 10))):
        statement(writer)
    _result(writer)
    return Program(tuple(writer.lines), draw(st.booleans()), function, draw(st.integers(0, 1000)))
