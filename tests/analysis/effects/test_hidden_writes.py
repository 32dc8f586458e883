"""Programs that write their argument by roundabout ways of Python; each is run to see that it does, then read."""
# ruff: noqa: B007, C406, C408, C410, C416, C417, F841, RUF005, RUF015 (the roundabout ways are the point)

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import operator
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchgraft.analysis.effects import effects_of
from torchgraft.ir.graph import Graph

LAYER = nn.ReLU(inplace=True)
TABLE = {"double": lambda t: t.mul_(2), "same": lambda t: t}
HELD: list[torch.Tensor] = []


def through_dict_items(x):
    for _, value in {"a": x}.items():
        value.mul_(2)


def through_dict_values(x):
    list({"a": x}.values())[0].mul_(2)


def through_dict_get(x):
    {"a": x}.get("a").mul_(2)


def through_dict_pop(x):
    {"a": x}.pop("a").mul_(2)


def through_setdefault(x):
    {}.setdefault("a", x).mul_(2)


def through_dict_update(x):
    found = {}
    found.update({"a": x})
    found["a"].mul_(2)


def through_dict_update_keyword(x):
    found = {}
    found.update(a=x)
    found["a"].mul_(2)


def through_dict_union(x):
    found = {} | {"a": x}
    found["a"].mul_(2)


def through_dict_union_in_place(x):
    found = {}
    found |= {"a": x}
    found["a"].mul_(2)


def through_dict_splat(x):
    {"a": x}["a"].mul_(2)


def through_dict_call(x):
    dict(a=x)["a"].mul_(2)
    dict([("a", x)])["a"].mul_(2)


def through_dict_comprehension(x):
    {i: t for i, t in enumerate([x])}[0].mul_(2)


def through_dict_with_integer_keys(x):
    {0: x}[0].mul_(2)


def through_ordered_dict(x):
    collections.OrderedDict(a=x)["a"].mul_(2)


def through_default_dict(x):
    found = collections.defaultdict(list)
    found["a"].append(x)
    found["a"][0].mul_(2)


def through_deque(x):
    collections.deque([x]).pop().mul_(2)


def through_counter_of_calls(x):
    found = collections.namedtuple("Found", "value")(x)
    found.value.mul_(2)


def through_chain(x):
    for value in itertools.chain([x], []):
        value.mul_(2)


def through_zip(x):
    for value, _ in zip([x], [1], strict=True):
        value.mul_(2)


def through_zip_of_unknown(x):
    for value, _ in zip(x.unbind(0), range(2), strict=True):
        value.mul_(2)


def through_enumerate(x):
    for _, value in enumerate([x]):
        value.mul_(2)


def through_reversed(x):
    next(iter(reversed([x]))).mul_(2)


def through_sorted(x):
    sorted([x], key=lambda t: 0)[0].mul_(2)


def through_max(x):
    max([x], key=lambda t: 0).mul_(2)


def through_next(x):
    next(iter([x])).mul_(2)


def through_map(x):
    for value in map(lambda t: t.view(-1), [x]):
        value.mul_(2)


def through_filter(x):
    next(filter(lambda t: True, [x])).mul_(2)


def through_reduce(x):
    functools.reduce(lambda a, b: a.add_(b), [x, 1])


def through_slice_of_list(x):
    [1, x][1:][0].mul_(2)


def through_repeated_tuple(x):
    ((x,) * 2)[1].mul_(2)


def through_list_concatenation(x):
    ([] + [x])[0].mul_(2)


def through_list_in_place_concatenation(x):
    found = []
    found += [x]
    found[0].mul_(2)


def through_slice_assignment(x):
    found = [1]
    found[:] = [x]
    found[0].mul_(2)


def through_insert(x):
    found = []
    found.insert(0, x)
    found.pop().mul_(2)


def through_copied_list(x):
    [x].copy()[0].mul_(2)
    list((x,))[0].mul_(2)


def through_copy_module(x):
    copy.copy([x])[0].mul_(2)


def through_star_assignment(x):
    first, *rest = 1, x, 2
    rest[0].mul_(2)


def through_nested_unpacking(x):
    (_, (value, _)), _ = (1, (x, 2)), 3
    value.mul_(2)


def through_swap(x):
    a, b = x, x.clone()
    a, b = b, a
    b.mul_(2)


def through_walrus(x):
    (y := x).mul_(2)


def through_walrus_in_comprehension(x):
    [y := t for t in [x]]
    y.mul_(2)


def through_closure(x):
    def make(t):
        return lambda: t.mul_(2)

    make(x)()


def through_rebound_closure(x):
    y = x.clone()
    double = lambda: y.mul_(2)
    y = x
    double()


def through_default_argument(x):
    def double(t=x):
        t.mul_(2)

    double()


def through_keyword_only_default(x):
    def double(*, t=x):
        t.mul_(2)

    double()


def through_outer_list(x):
    found = []

    def keep(t):
        found.append(t)

    keep(x)
    found[0].mul_(2)


def through_nonlocal(x):
    y = x.clone()

    def rebind():
        nonlocal y
        y = x

    rebind()
    y.mul_(2)


def through_decorated_inner_function(x):
    def twice(function):
        return lambda t: function(function(t))

    @twice
    def double(t):
        return t.mul_(2)

    double(x)


def through_star_arguments(x):
    def double(*values, **named):
        values[0].mul_(2)
        named["b"].mul_(2)

    double(x, b=x)


def through_forwarded_arguments(x):
    def outer(*values, **named):
        return inner(*values, **named)

    def inner(a, /, b=None, *, c=None):
        c.mul_(2)

    outer(1, 2, c=x)


def through_unknown_star(x):
    def double(a, b=None):
        b.mul_(2)

    values = [x for _ in range(x.shape[0])]
    double(*values)


def through_generator(x):
    def give(t):
        yield t

    for value in give(x):
        value.mul_(2)


def through_generator_list(x):
    def give(t):
        yield from [t]

    list(give(x))[0].mul_(2)


def through_generator_expression(x):
    next(t for t in [x]).mul_(2)


def through_null_context(x):
    with contextlib.nullcontext(x) as y:
        y.mul_(2)


@contextlib.contextmanager
def lend(value):
    yield value


def through_context_manager(x):
    with lend(x) as y:
        y.mul_(2)


class Lender:
    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *exception):
        return None


def through_context_object(x):
    with Lender(x) as y:
        y.mul_(2)


class Box:
    shared: list[torch.Tensor] = []

    def __init__(self, value=None):
        self.value = value
        self.values = []

    def __add__(self, other):
        return self.value

    def __neg__(self):
        return self.value

    def __iter__(self):
        return iter([self.value])

    def __getattr__(self, name):
        return self.__dict__["value"]

    def __eq__(self, other):
        self.value.mul_(2)
        return True

    def __bool__(self):
        self.value.mul_(2)
        return True

    def __len__(self):
        self.value.mul_(2)
        return 1

    def __contains__(self, item):
        self.value.mul_(2)
        return True

    def __hash__(self):
        return 0

    def __del__(self):
        pass

    @classmethod
    def of(cls, value):
        return cls(value)

    @staticmethod
    def double(value):
        return value.mul_(2)

    @functools.cached_property
    def doubled(self):
        return self.value.mul_(2)


def through_added_object(x):
    (Box(x) + 1).mul_(2)


def through_negated_object(x):
    (-Box(x)).mul_(2)


def through_iterated_object(x):
    for value in Box(x):
        value.mul_(2)


def through_missing_attribute(x):
    Box(x).something.mul_(2)


def through_equality(x):
    return Box(x) == 1


def through_truth(x):
    if Box(x):
        return 1


def through_length(x):
    return len(Box(x))


def through_containment(x):
    return 1 in Box(x)


def through_class_method(x):
    Box.of(x).value.mul_(2)


def through_static_method(x):
    Box.double(x)
    Box().double(x)


def through_cached_property(x):
    return Box(x).doubled


def through_list_attribute(x):
    box = Box()
    box.values.append(x)
    box.values[0].mul_(2)


def through_late_attribute(x):
    box = Box()
    box.late = x
    box.late.mul_(2)


def through_other_object(x):
    first, second = Box(), Box()
    first.value = second
    first.value.value = x
    second.value.mul_(2)


def through_aliased_object(x):
    first = Box()
    second = first if x.sum() > 0 else Box()
    second.value = x
    first.value.mul_(2)


def through_object_setattr(x):
    box = Box()
    object.__setattr__(box, "value", x)
    box.value.mul_(2)


def through_setattr(x):
    box = Box()
    setattr(box, "value", x)  # noqa: B010
    box.value.mul_(2)


def through_getattr(x):
    getattr(Box(x), "value").mul_(2)  # noqa: B009


def through_instance_dict(x):
    Box(x).__dict__["value"].mul_(2)


def through_vars(x):
    vars(Box(x))["value"].mul_(2)


def through_locals(x):
    locals()["x"].mul_(2)


def through_simple_namespace(x):
    types.SimpleNamespace(a=x).a.mul_(2)


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    copies: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.copies.append(self.value)


def through_post_init(x):
    Record(x).copies[0].mul_(2)


def through_replace(x):
    dataclasses.replace(Record(torch.ones(2)), value=x).value.mul_(2)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


def through_frozen_dataclass(x):
    Frozen(x).value.mul_(2)


def through_exception(x):
    try:
        raise ValueError(x)
    except ValueError as error:
        error.args[0].mul_(2)


def through_finally(x):
    try:
        return 1
    finally:
        x.mul_(2)


def through_else_of_loop(x):
    for _ in range(2):
        pass
    else:
        x.mul_(2)


def through_else_of_try(x):
    try:
        pass
    except ValueError:
        pass
    else:
        x.mul_(2)


def through_match(x):
    match x.dim():
        case 2:
            x.mul_(2)


def through_inner_class(x):
    class Inner:
        value = x

    Inner.value.mul_(2)


def through_weak_reference(x):
    weakref.ref(x)().mul_(2)


def through_item_getter(x):
    operator.itemgetter(0)([x]).mul_(2)


def through_attribute_getter(x):
    operator.attrgetter("data")(x).mul_(2)


def through_method_caller(x):
    operator.methodcaller("mul_", 2)(x)


def through_bound_method(x):
    double = x.mul_
    double(2)


def through_looked_up_function(x):
    getattr(torch, "relu" + "_")(x.neg_())


def through_namespace_of_module(x):
    F.__dict__["relu_"](x.neg_())


def through_table(x):
    TABLE["double"](x)


def through_table_in_loop(x):
    for function in TABLE.values():
        function(x)


def through_chosen_function(x):
    (torch.relu if x.sum() < 0 else torch.neg_)(x)


def through_global_module(x):
    return LAYER(x.neg_())


def through_new_module(x):
    return nn.Sequential(nn.ReLU(True))(x.neg_())


def through_numpy_array(x):
    x.__array__()[0] = 5


def through_memory_view(x):
    memoryview(x.numpy())[0, 0] = 5


def through_same_dtype(x):
    x.to(x.dtype).mul_(2)
    x.float().mul_(2)
    x.contiguous().mul_(2)


def through_expanded_view(x):
    x.expand(2, 2).mul_(2)


def through_mesh_grid(x):
    torch.meshgrid(x.view(-1)[:1], indexing="ij")[0].mul_(2)


def through_split_parts(x):
    for part in x.split(1):
        part.zero_()


def through_chunk_of_transposed(x):
    first, _ = x.T.chunk(2)
    first.zero_()


def through_detached_numpy(x):
    x.detach().numpy().fill(3)


def through_tensor_of_storage(x):
    torch.tensor([], dtype=x.dtype).set_(x.untyped_storage()).fill_(3)


def through_as_tensor(x):
    torch.as_tensor(x).mul_(2)
    torch.asarray(x).mul_(2)


def through_from_numpy(x):
    torch.from_numpy(x.numpy()).mul_(2)


def through_parameter(x):
    with torch.no_grad():
        nn.Parameter(x).mul_(2)


def through_functional_call(x):
    torch.func.functional_call(LAYER, {}, (x.neg_(),))


def through_vmap(x):
    torch.vmap(lambda t: t.mul_(2))(x)


def through_checkpoint(x):
    from torch.utils.checkpoint import checkpoint

    checkpoint(lambda t: t.mul_(2), x, use_reentrant=False)


def through_while_loop(x):
    pending = [x]
    while pending:
        pending.pop().mul_(2)


def through_growing_list(x):
    pending = [0]
    for i in range(3):
        if i == 1:
            pending.append(x)
        last = pending[-1]
    last.mul_(2)


def through_loop_variable(x):
    for t in (1, x):
        pass
    t.mul_(2)


def through_two_rounds(x):
    a = b = x.clone()
    for _ in range(3):
        b.mul_(2)
        b = a
        a = x


def through_mutual_recursion(x, depth=4):
    return _other(x, depth - 1) if depth else x.mul_(2)


def _other(x, depth):
    return through_mutual_recursion(x, depth)


def through_recursive_container(x):
    def walk(value):
        if isinstance(value, list):
            for item in value:
                walk(item)
        else:
            value.mul_(2)

    walk([[x]])


def through_global_that_holds_it(x):
    HELD.append(x)
    HELD.pop().mul_(2)


def through_set_of_tensors(x):
    for value in {x}:
        value.mul_(2)


def through_string_key_from_format(x):
    {"a1": x}[f"a{1}"].mul_(2)


def through_conditional_expression_in_call(x):
    F.relu(x.neg_(), inplace=x.dim() == 2)


def through_keywords_of_unknown_value(x):
    options = {"inplace": bool(x.dim())}
    F.relu(x.neg_(), **options)


def through_setitem_on_view_in_tuple(x):
    (x[0], x[1])[1][0] = 7


def through_chained_assignment(x):
    a = b = x
    a = a.clone()
    b.mul_(2)


def through_deleted_name(x):
    y = x
    del x
    y.mul_(2)


def through_type_call(x):
    type(x)(x).mul_(2) if False else x.mul_(2)


def through_super(x):
    class Child(Lender):
        def __enter__(self):
            return super().__enter__()

    with Child(x) as y:
        y.mul_(2)


def through_truth_by_builtin(x):
    return bool(Box(x))


def through_sum_of_object(x):
    for value in list(Box(x)):
        value.mul_(2)


def through_star_into_operator(x):
    arguments = [value for value in (x, 2)]
    torch.Tensor.mul_(*arguments)


def through_stored_argument(x):
    holder = Box()
    HELD.append(holder)
    holder.value = x
    HELD.pop().value.mul_(2)


def through_set_of_memory(x):
    y = torch.empty(0)
    y.set_(x)
    y.mul_(2)


def through_set_of_data(x):
    y = torch.empty(0)
    y.data = x
    y.mul_(2)


PROGRAMS = [value for name, value in list(globals().items()) if name.startswith("through_")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__.removeprefix("through_"))
def test_a_hidden_write_is_found(function):
    x = torch.ones(2, 2)
    function(x)
    assert not torch.equal(x, torch.ones(2, 2)), "the program does not write"

    def returning(value):
        return function(value), value

    graph = Graph()
    placeholder = graph.placeholder("x")
    effects = effects_of(graph.call_function(returning, (placeholder,)))
    assert effects.unknown or placeholder in effects.writes, effects
