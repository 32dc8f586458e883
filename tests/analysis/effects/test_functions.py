"""Effects of Python functions, found by reading their source: small programs that try to hide what they do."""

import dataclasses
import functools
import io
import logging
import math
import operator
import random
import sys
import threading
import time
import warnings
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F

from torchgraft.analysis.effects import Effects, effects_of
from torchgraft.ir.graph import Graph

REGISTRY: dict[str, torch.Tensor] = {}
SEEN: list[int] = []
COUNT = 0
FLAG = False
SHARED = torch.zeros(2)


def effects_of_call(function, *constants, **keywords) -> tuple[Effects, object]:
    graph = Graph()
    x = graph.placeholder("x")
    return effects_of(graph.call_function(function, (x, *constants), keywords)), x


# ---- programs that write their argument ----


def in_place_method(x):
    return x.mul_(2)


def in_place_through_a_view(x):
    x.view(-1)[0:1].add_(1)
    return x + 1


def in_place_through_data(x):
    x.data.mul_(2)
    return x.sum()


def in_place_through_numpy(x):
    x.numpy()[0] = 1
    return x.sum()


def in_place_through_storage(x):
    x.untyped_storage().fill_(0)
    return x.sum()


def in_place_through_list(x):
    holder = []
    holder.append(x)
    holder[0].mul_(2)
    return 1


def in_place_through_nested_containers(x):
    holder = {"a": [(x, 1)]}
    first, _ = holder["a"][0]
    first += 1
    return 1


def in_place_through_alias_of_list(x):
    first = []
    second = first if x.sum() > 0 else []
    second.append(x)
    first[0].mul_(2)
    return 1


def in_place_through_extend(x):
    holder = []
    holder.extend([x])
    for item in holder:
        item.mul_(2)
    return 1


def in_place_in_comprehension(x):
    return [t.mul_(2) for t in (x, x)]


def in_place_in_generator(x):
    return sum(t.mul_(2).sum() for t in [x])


def in_place_in_lambda(x):
    return list(map(lambda t: t.mul_(2), [x]))  # noqa: C417


def in_place_in_sort_key(x):
    return sorted([x], key=lambda t: t.mul_(2).sum())


def in_place_in_nested_function(x):
    def inner():
        x.mul_(2)

    inner()
    return 1


def in_place_in_generator_function(x):
    def give():
        yield x.mul_(2)

    for _ in give():
        pass
    return 1


def in_place_after_branch(x):
    y = x if x.sum() > 0 else x.clone()
    y.mul_(2)
    return 1


def in_place_after_or(x):
    y = None or x
    y.mul_(2)
    return 1


def in_place_after_loop(x):
    y = x.clone()
    for _ in range(x.shape[0]):
        y.mul_(2)
        y = x
    return 1


def in_place_after_continue(x):
    for _ in range(x.shape[0]):
        y = x
        if x.sum() > 0:
            continue
        y = x.clone()
    y.mul_(2)
    return 1


def in_place_after_break(x):
    y = x.clone()
    while True:
        if y.sum() > 100:
            y = x
            break
        y = y * 2
    y.mul_(2)
    return 1


def in_place_after_exception(x):
    y = x.clone()
    try:
        y = x
        y = y.reshape(7, 13, 17)
        y = y.clone()
    except RuntimeError:
        y.mul_(2)
    return 1


def in_place_after_suppressed_exception(x):
    y = x.clone()
    with ExitQuietly():
        y = x
        y.reshape(7, 13, 17)
        y = x.clone()
    y.mul_(2)
    return 1


class ExitQuietly:
    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return True


def in_place_with_operator(x):
    operator.iadd(x, 1)
    return 1


def in_place_augmented(x):
    x += 1
    return x


def in_place_augmented_item(x):
    x[0] += 1
    return 1


def in_place_item(x):
    x[0] = 1
    return 1


def in_place_setitem(x):
    x.__setitem__(0, 1)
    return 1


def in_place_attribute(x):
    x.requires_grad = True
    return 1


def in_place_deleted_item(x):
    del x[0]
    return 1


def in_place_with_out(x):
    torch.add(x, 1, out=x)
    return 1


def in_place_with_out_tuple(x):
    torch.max(x.clone(), 0, out=(x, torch.empty(0, dtype=torch.long)))
    return 1


def in_place_foreach(x):
    torch._foreach_mul_([x, x.clone()], 2.0)
    return 1


def in_place_by_flag(x, inplace=True):
    return F.relu(x, inplace)


def in_place_by_keywords(x, **options):
    return F.relu(x, **{"inplace": True, **options})


def in_place_by_stars(x):
    arguments = (x, True)
    return F.relu(*arguments)


def in_place_by_partial(x):
    return functools.partial(F.relu, inplace=True)(x)


def in_place_descriptor(x):
    return torch.Tensor.mul_(x, 2)


def in_place_overload(x):
    return torch.ops.aten.mul_.Tensor(x, x)


def in_place_initialization(x):
    return torch.nn.init.constant_(x, 1.0)


def in_place_without_gradient(x):
    with torch.no_grad():
        x.zero_()
    return 1


@torch.no_grad()
def in_place_decorated(x):
    x.zero_()
    return 1


def in_place_through_positive(x):
    y = +x
    y.mul_(2)
    return 1


def in_place_through_tensor_constructor(x):
    torch.Tensor(x).mul_(2)
    return 1


def in_place_through_composite(x):
    (y,) = torch.broadcast_tensors(x)
    y.mul_(2)
    return 1


def in_place_through_einsum(x):
    torch.einsum("...->...", x).mul_(2)
    return 1


def in_place_through_eval_dropout(x):
    F.dropout(x, training=False).mul_(2)
    return 1


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def in_place_through_named_tuple(x):
    Pair(x, 1).first.mul_(2)
    return 1


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    size: int = 0


def in_place_through_dataclass(x):
    record = Record(value=x)
    record.value.mul_(2)
    return 1


class Holder:
    def __init__(self, value):
        self.value = value

    def double(self):
        self.value.mul_(2)

    @property
    def doubled(self):
        return self.value.mul_(2)

    def __getitem__(self, index):
        return self.value

    def __call__(self):
        return self.value.mul_(2)


def in_place_through_method_of_object(x):
    Holder(x).double()
    return 1


def in_place_through_property(x):
    return Holder(x).doubled


def in_place_through_item_of_object(x):
    Holder(x)[0].mul_(2)
    return 1


def in_place_through_callable_object(x):
    return Holder(x)()


class TwiceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class TwiceInPlaceWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def in_place_in_autograd_function(x):
    return TwiceInPlace.apply(x)


def in_place_in_autograd_function_with_setup(x):
    return TwiceInPlaceWithSetup.apply(x)


def in_place_in_recursion(x, depth=3):
    if depth == 0:
        return x.mul_(2)
    return in_place_in_recursion(x, depth - 1)


def in_place_in_unbounded_recursion(x):
    if x.sum() > 100:
        return x
    return in_place_in_unbounded_recursion(x.mul_(2))


def writes_max_norm(x):
    return F.embedding(torch.tensor([0]), x, max_norm=1.0)


def writes_statistics(x):
    return F.batch_norm(torch.ones(2, 3), x, x, training=True)


WRITERS = [value for name, value in list(globals().items()) if name.startswith(("in_place_", "writes_"))]


@pytest.mark.parametrize("function", WRITERS, ids=lambda function: function.__name__)
def test_a_write_of_the_argument_is_found(function):
    effects, x = effects_of_call(function)
    assert effects.unknown or x in effects.writes, effects


PRECISE = [f for f in WRITERS if f is not in_place_through_tensor_constructor]


@pytest.mark.parametrize("function", PRECISE, ids=lambda function: function.__name__)
def test_a_write_is_found_by_reading_on_and_not_by_giving_up(function):
    if function is in_place_through_einsum and torch.backends.opt_einsum.is_available():
        pytest.skip("torch.einsum asks another library for the order of its products, which is not read")
    effects, x = effects_of_call(function)
    assert not effects.unknown, effects.reasons
    assert x in effects.writes


# ---- programs that change the world ----


def outside_global_name(x):
    global COUNT
    COUNT += 1
    return x


def outside_global_dict(x):
    REGISTRY["x"] = x
    return x


def outside_global_list(x):
    SEEN.append(1)
    return x


def outside_deleted_item(x):
    del REGISTRY["x"]
    return x


def outside_default_argument(x, memory=[]):  # noqa: B006
    memory.append(x)
    return x


def outside_function_attribute(x):
    outside_function_attribute.calls = 1
    return x


def outside_class_attribute(x):
    Holder.calls = 1
    return x


def outside_module_attribute(x):
    torch.backends.cudnn.benchmark = True
    return x


def _counter():
    calls = 0

    def count(x):
        nonlocal calls
        calls += 1
        return x

    return count


outside_nonlocal_name = _counter()


def outside_print(x):
    print("x")
    return x


def outside_log(x):
    logging.getLogger(__name__).info("x")
    return x


def outside_file(x):
    with open("x", "w") as file:
        file.write("x")
    return x


def outside_exec(x):
    exec("COUNT = 1")
    return x


def outside_setattr(x):
    setattr(Holder, "calls", 1)  # noqa: B010
    return x


def outside_thread(x):
    threading.Thread(target=print).start()
    return x


def outside_time(x):
    return x + time.time()


def outside_python_random(x):
    return x + random.random()


def outside_numpy_random(x):
    return x + numpy.random.rand()


def outside_seed(x):
    torch.manual_seed(0)
    return x


def outside_grad_mode(x):
    torch.set_grad_enabled(False)
    return x


def outside_default_dtype(x):
    torch.set_default_dtype(torch.float64)
    return x


def outside_backward(x):
    x.sum().backward()
    return x


def outside_hook(x):
    x.register_hook(print)
    return x


def outside_save(x):
    torch.save(x, "x")
    return x


def outside_unknown_function(x):
    return x.callback(x)


def outside_looked_up_method(x):
    return getattr(x, "mul_")(2)  # noqa: B009


def outside_checks_only(x):
    assert x.shape[0] == 2


def outside_raises(x):
    if x.sum() > 0:
        raise ValueError


def outside_file_object(x):
    io.FileIO("x", "w")
    return x


def outside_tensor_of_module(x):
    getattr(sys.modules[__name__], "SHARED").mul_(2)  # noqa: B009
    return x


def outside_tensor_by_computed_name(x):
    getattr(torch.nn, "SHA" + "RED").mul_(2)
    return x


def outside_lock(x):
    with threading.Lock():
        return x


def outside_tensor_of_class(x):
    Holder.shared.mul_(2)
    return x


outside_two_lambdas = [lambda x: x.mul_(2), lambda x: x][0]
WORLD = [value for name, value in list(globals().items()) if name.startswith("outside_")]


@pytest.mark.parametrize("function", WORLD, ids=lambda function: function.__name__)
def test_a_change_of_the_world_is_found(function):
    effects, _ = effects_of_call(function)
    assert effects.unknown or effects.writes, effects


# ---- programs that draw random numbers ----


def random_rand(x):
    return x + torch.rand(2)


def random_method(x):
    return x.bernoulli()


def random_fresh_in_place(x):
    return torch.empty_like(x).uniform_()


def random_dropout(x):
    return F.dropout(x)


def random_gumbel(x):
    return F.gumbel_softmax(x)


def random_in_comprehension(x):
    return [torch.randn(2) for _ in range(3)]


def random_permutation(x):
    return x[torch.randperm(2)]


def random_fractional_pool(x):
    return F.fractional_max_pool2d(x, 2, output_size=2)


def random_star_arguments(x):
    return torch.dropout(*x)


def random_star_keywords(x):
    return F.scaled_dot_product_attention(x, x, x, **dict(x.options))


def random_low_rank(x):
    return torch.svd_lowrank(x)


DRAWS = [value for name, value in list(globals().items()) if name.startswith("random_")]


@pytest.mark.parametrize("function", DRAWS, ids=lambda function: function.__name__)
def test_a_random_draw_is_found(function):
    effects, _ = effects_of_call(function)
    assert effects.random or effects.unknown
    assert not effects.writes


# ---- programs that do nothing but compute ----


def pure_arithmetic(x):
    return (x + 1) * 2 - x @ x.T


def pure_in_place_on_fresh_memory(x):
    y = torch.zeros_like(x)
    y.add_(x)
    y[0] = 1
    y += 1
    return y


def pure_in_place_on_copy(x):
    y = x.clone()
    y.mul_(2)
    return y


def pure_in_place_on_result(x):
    y = x * 2
    y.relu_()
    y.view(-1)[0] = 3
    return y


def pure_local_containers(x):
    out = []
    seen = {}
    for i in range(3):
        out.append(x * i)
        seen[i] = x
    out[0] = x
    return torch.stack(out)


def pure_integer_counter(x):
    count = 0
    for _ in range(3):
        count += 1
    height, width = x.shape
    height += 1
    return x.reshape(height - 1, width) * count


def pure_without_gradient(x):
    with torch.no_grad():
        return x * 2


@torch.no_grad()
def pure_decorated(x):
    return x * 2


def pure_autocast(x):
    with torch.autocast("cpu"):
        return x @ x


def pure_warning(x):
    if x.dim() > 2:
        warnings.warn("large", stacklevel=2)
    return x * 2


def pure_exception(x):
    if x.dim() > 5:
        raise ValueError(f"{x.dim()} dimensions")
    return x * 2


def pure_try(x):
    try:
        return x.view(2, -1)
    except RuntimeError as error:
        raise ValueError("shape") from error


def pure_comprehensions(x):
    parts = [t * 2 for t in x.unbind(0)]
    named = {str(i): part for i, part in enumerate(parts)}
    return torch.cat([named[key] for key in sorted(named)])


def pure_inner_function(x):
    def twice(value):
        return value * 2

    return twice(x) + (lambda value: value)(x)


def pure_dispatch(x):
    activation = F.relu if x.dim() == 2 else F.gelu
    return activation(x)


def pure_options(x, **options):
    if options.get("double", False):
        x = x * 2
    return F.softmax(x, dim=options.pop("dim", -1))


def pure_math(x):
    return x * math.sqrt(max(1, len(x.shape))) + math.pi


def pure_objects(x):
    record = Record(x, size=2)
    pair = Pair(record.value, record.size)
    return pair.first + Holder(x).value


def pure_autograd_function(x):
    return Twice.apply(x)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.scale = 2
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale


def pure_recursion(x, depth=5):
    return x if depth == 0 else pure_recursion(x * 2, depth - 1)


def pure_einsum(x):
    return torch.einsum("ij,kj->ik", x, x)


def pure_attention(x):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.0)


def pure_dropout(x):
    return F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0)


def pure_rotation(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def pure_mask(x):
    mask = torch.full((x.shape[0], x.shape[0]), float("-inf"))
    mask = torch.triu(mask, diagonal=1)
    return x.masked_fill(mask == 0, 0.0)


def pure_scatter(x):
    return torch.zeros(2, 2).scatter_(0, x.long(), 1.0)


def pure_interpolation(x):
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def pure_pooling(x):
    return F.max_pool2d(x, 2, return_indices=True)


@functools.lru_cache
def pure_cached(x):
    return x * 2


PURE = [value for name, value in list(globals().items()) if name.startswith("pure_")]


@pytest.mark.parametrize("function", PURE, ids=lambda function: function.__name__)
def test_a_computation_has_no_effect(function):
    effects, _ = effects_of_call(function)
    assert not effects, effects.reasons


# ---- flags, globals, source ----


def branch_on_argument(x, inplace=False, mode="copy"):
    if inplace and mode == "write":
        return x.relu_()
    return x.relu()


def branch_on_global(x):
    return x.relu_() if FLAG else x.relu()


def test_constant_arguments_decide_branches():
    assert not effects_of_call(branch_on_argument)[0]
    assert not effects_of_call(branch_on_argument, True)[0]
    assert effects_of_call(branch_on_argument, True, mode="write")[0]
    assert effects_of_call(branch_on_argument, inplace=True, mode="write")[0]


def test_an_argument_that_is_traced_does_not_decide():
    graph = Graph()
    x, flag = graph.placeholder("x"), graph.placeholder("flag")
    assert effects_of(graph.call_function(branch_on_argument, (x, flag, "write"))).writes == {x}


def test_an_answer_is_not_remembered_past_a_change_of_what_it_read(monkeypatch):
    assert not effects_of_call(branch_on_global)[0]
    monkeypatch.setattr(sys.modules[__name__], "FLAG", True)
    assert effects_of_call(branch_on_global)[0].writes
    monkeypatch.setattr(sys.modules[__name__], "FLAG", False)
    assert not effects_of_call(branch_on_global)[0]


def test_a_function_without_source_is_unknown():
    namespace: dict = {}
    exec("def made(x):\n    return x", namespace)
    effects, _ = effects_of_call(namespace["made"])
    assert effects.unknown
    assert effects.reasons == ("the source of made is not there",)


@pytest.mark.parametrize(
    "before, after",
    [
        ("return x.mul_(2)", "return x.mul(2)"),
        ("x[0] = 1; return x", "x[0] == 1; return x"),
        ("x += 1; return x", "x + 1; return x"),
    ],
)
def test_a_function_whose_file_changed_is_not_read(tmp_path, before, after):
    path = tmp_path / "edited_after_import.py"
    path.write_text(f"def late(x):\n    {before}\n")
    namespace: dict = {"__name__": "edited_after_import"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    path.write_text(f"def late(x):\n    {after}\n")
    effects, _ = effects_of_call(namespace["late"])
    assert effects


def test_an_autograd_function_can_be_the_target():
    assert not effects_of_call(Twice.apply)[0], effects_of_call(Twice.apply)[0].reasons
    effects, x = effects_of_call(TwiceInPlace.apply)
    assert effects.writes == {x}


def test_reasons_name_the_operator():
    effects, _ = effects_of_call(F.relu, inplace=True)
    assert effects.reasons == ("relu_ writes its argument 'self'",)


def test_the_result_says_whose_memory_it_shares():
    assert effects_of_call(F.dropout, 0.5, False)[0].shares
    assert not effects_of_call(F.relu)[0].shares
    effects, x = effects_of_call(lambda x: [x.view(-1)])
    assert effects.shares == {x}
