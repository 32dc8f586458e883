"""Varied small programs, each built with the library it is given, whose generated code is compared between libraries.

The comparison itself is in test_code_equality; more elaborate models are in networks.
"""

import dataclasses
import enum
import math
import operator
import typing
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional

Program = Callable[[ModuleType], nn.Module]

PROGRAMS: dict[str, Program] = {}


def program(build: Program) -> Program:
    """Register a builder; its argument is the library to build with."""
    PROGRAMS[build.__name__] = build
    return build


class Point(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


def leaf(*args, **kwargs):
    return args[0]


def with_leaf(fx: ModuleType, function, *leaves) -> nn.Module:
    """Trace ``function`` keeping ``leaf`` (and others given) as calls."""
    tracer = fx.Tracer(autowrap_functions=(leaf, *leaves))
    graph = tracer.trace(function)
    return fx.GraphModule(tracer.root, graph)


@program
def arithmetic(fx):
    def forward(x, y):
        a = x + y - 2 * x
        b = a / 3 // 2 % 5
        c = b**2 @ y
        return -c, +c, ~x, abs(y)

    return fx.symbolic_trace(forward)


@program
def comparisons_and_bits(fx):
    return fx.symbolic_trace(
        lambda x, y: (x == y, x != y, x < y, x > y, x <= y, x >= y, x & y, x | y, x ^ y, x << 1, x >> 1, 3 - x)
    )


@program
def reflected_operators(fx):
    return fx.symbolic_trace(lambda x: (1 + x, 2 - x, 3 * x, 4 / x, 5 // x, 6 % x, 7**x, 8 << x, 9 >> x, 1 & x, 1 | x))


@program
def chained_methods(fx):
    return fx.symbolic_trace(lambda x: x.relu().transpose(0, 1).contiguous().view(-1, 4).sum(dim=0, keepdim=True))


@program
def in_place_methods(fx):
    return fx.symbolic_trace(lambda x: x.add_(1).mul_(2).clamp_(min=0))


@program
def attributes_and_shapes(fx):
    def forward(x):
        batch, width = x.shape
        return x.reshape(batch * width, x.size(0)).T, x.dtype, x.is_cuda, x.device.type

    return fx.symbolic_trace(forward)


@program
def arithmetic_of_shapes(fx):
    def forward(x):
        y = x.view(x.shape[:-1] + (2, -1)).expand((5,) + x.shape)  # noqa: RUF005
        return y.reshape([x.size(0) * 2, *(3, 4)]), x.new_zeros(x.shape), torch.arange(x.shape[-1])

    return fx.symbolic_trace(forward)


@program
def questions_that_are_not_about_values(fx):
    def forward(x):
        if torch.jit.is_scripting() or torch.jit.is_tracing():
            return -x
        return x.to(torch.float64).masked_fill(x > 0, torch.finfo(torch.float32).min)

    return fx.symbolic_trace(forward)


@program
def slices_and_indices(fx):
    return fx.symbolic_trace(lambda x, n: (x[0], x[:, 1:n, ::2], x[..., None], x[[0, 1]], x["key"], x[n], x[:, n - 1]))


@program
def structures_returned(fx):
    return fx.symbolic_trace(lambda x: {"one": [x, (x + 1,)], "two": {"deep": (x, None)}, 3: [], "four": ()})


@program
def single_element_tuples(fx):
    return fx.symbolic_trace(lambda x: (torch.cat((x,)), (x,), ((x,),)))


@program
def constant_only(fx):
    return fx.symbolic_trace(lambda x: 5)


@program
def nothing_at_all(fx):
    def forward():
        return None

    return fx.symbolic_trace(forward)


@program
def literal_arguments(fx):
    return with_leaf(
        fx,
        lambda x: leaf(
            x, True, 3, -2.5, 1 + 2j, "it's", 'a "quote"', "new\nline", "back\\slash", None, ..., 1e-7, 10**20
        ),
    )


@program
def infinities(fx):
    return with_leaf(fx, lambda x: leaf(x, float("inf"), -float("inf"), float("nan"), [math.inf]))


@program
def torch_constants(fx):
    return with_leaf(
        fx,
        lambda x: leaf(
            x, torch.float16, torch.device("cpu"), torch.device("cuda", 1), torch.strided, torch.channels_last
        ),
    )


@program
def factory_keywords(fx):
    return fx.symbolic_trace(lambda x: torch.zeros_like(x, dtype=torch.float64, device=torch.device("cpu")) + x)


@program
def containers_of_literals(fx):
    return with_leaf(
        fx, lambda x: leaf(x, [1, (2, 3), {"a": [x]}], slice(x, None, 2), torch.Size([1, 2]), {}, key={"k": (x,)})
    )


@program
def enumeration_arguments(fx):
    return with_leaf(fx, lambda x: leaf(x, Mode.FAST, [Mode.EXACT], mode=Mode.FAST))


@program
def named_tuple_construction(fx):
    return with_leaf(fx, lambda x, y: leaf(Point(x, y), Point(y, x)))


@program
def dataclass_construction(fx):
    return fx.symbolic_trace(lambda x, y: Pair(left=x, right=[y, y]))


@program
def functional_calls(fx):
    def forward(x, w):
        x = functional.relu(x, inplace=False)
        x = functional.gelu(x)
        x = functional.conv2d(x, w, bias=None, stride=(1, 1), padding=1)
        x = functional.max_pool2d(x, 2)
        x = functional.adaptive_avg_pool2d(x, (1, 1))
        x = functional.dropout(x, p=0.1, training=True)
        x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return functional.log_softmax(torch.flatten(x, 1), dim=-1)

    return fx.symbolic_trace(forward)


@program
def torch_functions(fx):
    def forward(x, y):
        z = torch.cat([x, y], dim=1)
        z = torch.where(z > 0, z, torch.exp(z) - 1)
        z = torch.einsum("ij,kj->ik", z, z)
        return torch.linalg.norm(z), torch.fft.fft(z), torch.special.expit(z), torch.topk(z, k=2).values

    return fx.symbolic_trace(forward)


@program
def aten_operators(fx):
    def forward(x):
        return torch.ops.aten.relu.default(x), torch.ops.aten.add.Tensor(x, x, alpha=2), torch.ops.aten.neg(x)

    return fx.symbolic_trace(forward)


@program
def math_functions(fx):
    return fx.symbolic_trace(lambda x: math.sqrt(x) + math.floor(x) * math.pi)


@program
def builtin_names(fx):
    def forward(x):
        return x.sum() + x.max() - x.min() + x.abs().any().all().float().int() + torch.sum(x) + x.len() + x.type()

    return fx.symbolic_trace(forward)


@program
def keyword_named_inputs(fx):
    def forward(input, type, len, id):
        return input + type + len + id

    return fx.symbolic_trace(forward)


@program
def unused_values(fx):
    def forward(x, unused):
        torch.relu(x)
        x.sum()
        y = x + 1
        y.mul(2)
        return y

    return fx.symbolic_trace(forward)


@program
def values_dying_together(fx):
    def forward(a, b, c):
        d = torch.cat([a, b, c, a])
        e = torch.stack([d, d])
        return torch.addmm(e, e, d) + d

    return fx.symbolic_trace(forward)


@program
def defaults(fx):
    def forward(x, scale=2.0, name="text", shape=(1, 2), flag=True, none=None, limit=float("inf"), kind=torch.float32):
        return x * scale

    return fx.symbolic_trace(forward)


@program
def keyword_only_and_starred(fx):
    def forward(x, *, scale, offset=1, **options):
        return x * scale + offset + options["more"]

    return fx.symbolic_trace(forward)


@program
def starred(fx):
    def forward(x, *rest):
        return x + rest[0]

    return fx.symbolic_trace(forward)


@program
def simple_annotations(fx):
    def forward(x: torch.Tensor, n: int, s: str = "a", f: float = 1.0, b: bool = False) -> torch.Tensor:
        return x * n

    return fx.symbolic_trace(forward)


@program
def typing_annotations(fx):
    def forward(
        x: typing.List[torch.Tensor],  # noqa: UP006
        y: typing.Optional[torch.Tensor] = None,  # noqa: UP045
        z: typing.Dict[str, int] = None,  # noqa: UP006, RUF013
        w: typing.Tuple[int, str] = (),  # noqa: UP006
        u: typing.Union[int, str] = 1,  # noqa: UP007
        v: typing.Any = None,
        c: typing.Callable = None,  # noqa: RUF013
    ) -> typing.Tuple[torch.Tensor, torch.Tensor]:  # noqa: UP006
        return x[0], x[1]

    return fx.symbolic_trace(forward)


@program
def builtin_generic_annotations(fx):
    def forward(x: list[torch.Tensor], y: dict[str, tuple[int, float]], z: int | None = None) -> tuple[torch.Tensor]:
        return (x[0],)

    return fx.symbolic_trace(forward)


@program
def annotations_of_classes(fx):
    def forward(p: Point, m: Mode, d: torch.device, t: torch.dtype, e: torch.nn.Module) -> Pair:
        return p

    return fx.symbolic_trace(forward)


@program
def tensor_constants(fx):
    one, two = torch.ones(2), torch.zeros(2)
    return fx.symbolic_trace(lambda x: (x + one - two) * one)


@program
def calls_of_values(fx):
    return fx.symbolic_trace(lambda f, x: f(x, 1, key=x)(x))


@program
def leaf_functions_of_this_file(fx):
    return with_leaf(fx, lambda x: leaf(leaf(x), key=leaf(x, 1)))


@program
def functions_of_the_same_name(fx):
    def make(number):
        def action(x):
            return x + number

        return action

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(make(1), (x,)), graph.call_function(make(2), (x,))])
    return fx.GraphModule({}, graph)


@program
def specialised_inputs(fx):
    def forward(x, flag, times):
        for _ in range(times):
            x = x + 1
        return x if flag else -x

    return fx.symbolic_trace(forward, concrete_args={"flag": True, "times": 2})


@program
def by_hand_every_opcode(fx):
    graph = fx.Graph()
    x = graph.placeholder("x", type_expr=torch.Tensor)
    y = graph.placeholder("y", default_value=None)
    weight = graph.get_attr("block.weight")
    hidden = graph.call_module("block.layer", (x,), {"extra": y})
    method = graph.call_method("view", (hidden, -1), type_expr=torch.Tensor)
    function = graph.call_function(torch.add, (method, weight), {"alpha": 2})
    graph.output((function, y), type_expr=tuple)
    return fx.GraphModule({"block.weight": nn.Parameter(torch.ones(1)), "block.layer": nn.Identity()}, graph)


@program
def by_hand_store(fx):
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.placeholder("y")
    graph.call_function(operator.setitem, (x, (0, slice(None)), y))
    graph.output(x)
    return fx.GraphModule({}, graph)


@program
def by_hand_getattr_forms(fx):
    graph = fx.Graph()
    x = graph.placeholder("x")
    plain = graph.call_function(getattr, (x, "shape"))
    default = graph.call_function(getattr, (x, "shape", None))
    odd = graph.call_function(getattr, (x, "not an identifier"))
    graph.output((plain, default, odd))
    return fx.GraphModule({}, graph)


@program
def by_hand_operators_without_symbols(fx):
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.placeholder("y")
    parts = [
        graph.call_function(operator.not_, (x,)),
        graph.call_function(operator.contains, (x, y)),
        graph.call_function(operator.is_, (x, y)),
        graph.call_function(operator.concat, (x, y)),
        graph.call_function(operator.getitem, (x, (y, slice(None)))),
        graph.call_function(len, (x,)),
        graph.call_function(isinstance, (x, y)),
    ]
    graph.output(parts)
    return fx.GraphModule({}, graph)


@program
def by_hand_odd_names(fx):
    graph = fx.Graph()
    values = [
        graph.create_node("placeholder", f"p{i}", name=name) for i, name in enumerate(("torch", "len", "class", "x.y"))
    ]
    more = [graph.create_node("call_function", torch.neg, (value,), name=value.name) for value in values]
    graph.output(more)
    return fx.GraphModule({}, graph)


@program
def by_hand_dotted_and_numbered_targets(fx):
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_module("layers.0.conv-a", (x,))
    b = graph.call_module("layers.10.1", (a,))
    graph.output((b, graph.get_attr("layers.0.w.1")))
    modules = {"layers.0.conv-a": nn.ReLU(), "layers.10.1": nn.ReLU(), "layers.0.w.1": nn.Parameter(torch.ones(1))}
    return fx.GraphModule(modules, graph)


@program
def without_output(fx):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.relu, (x,))
    return fx.GraphModule({}, graph)


@program
def empty_graph(fx):
    return fx.GraphModule({}, fx.Graph())


@program
def retraced(fx):
    return fx.symbolic_trace(fx.symbolic_trace(lambda x: torch.relu(x) + x.sum() * 2))


@program
def transformed(fx):
    return fx.Transformer(fx.symbolic_trace(lambda x, y=2: torch.relu(x) + x.sum() * y)).transform()


@program
def rewritten(fx):
    module = fx.symbolic_trace(lambda x: torch.relu(torch.relu(x) + 1) + 1)
    fx.replace_pattern(module, lambda x: torch.relu(x) + 1, lambda x: torch.sigmoid(x).neg())
    return module


@program
def erased_and_inserted(fx):
    module = fx.symbolic_trace(lambda x: torch.relu(x).neg())
    for node in list(module.graph.nodes):
        if node.target is torch.relu:
            with module.graph.inserting_after(node):
                new = module.graph.call_function(torch.relu, (node.args[0],))
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)
    module.recompile()
    return module
