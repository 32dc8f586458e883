"""What ``symbolic_trace`` makes of plain functions, modules and methods and of the shapes their signatures take.

Specialising inputs with concrete_args has its own file.
"""

import functools
import math
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional


def opcodes(graph) -> list[str]:
    return [node.op for node in graph.nodes]


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 4))
        self.linear = nn.Linear(4, 5)
        self.register_buffer("offset", torch.ones(5))

    def forward(self, x):
        return self.linear(x + self.weight).clamp(min=0.0, max=1.0) + self.offset


def test_function_becomes_a_graph_module(fx: ModuleType) -> None:
    def double_and_add(x, y):
        return 2 * x + y

    traced = fx.symbolic_trace(double_and_add)
    assert isinstance(traced, fx.GraphModule)
    assert isinstance(traced, nn.Module)
    assert isinstance(traced.graph, fx.Graph)
    assert traced(3, 4) == 10
    assert opcodes(traced.graph) == ["placeholder", "placeholder", "call_function", "call_function", "output"]


def test_class_name_is_that_of_the_root(fx: ModuleType) -> None:
    def named_function(x):
        return x

    assert type(fx.symbolic_trace(named_function)).__name__ == "named_function"
    assert type(fx.symbolic_trace(Affine())).__name__ == "Affine"


def test_module_becomes_the_nodes_of_the_documentation(fx: ModuleType) -> None:
    model = Affine()
    traced = fx.symbolic_trace(model)
    assert opcodes(traced.graph) == [
        "placeholder",
        "get_attr",
        "call_function",
        "call_module",
        "call_method",
        "get_attr",
        "call_function",
        "output",
    ]
    assert [node.name for node in traced.graph.nodes] == [
        "x", "weight", "add", "linear", "clamp", "offset", "add_1", "output",
    ]  # fmt: skip
    x = torch.rand(3, 4)
    assert torch.equal(traced(x), model(x))


def test_parameters_are_shared_with_the_original(fx: ModuleType) -> None:
    model = Affine()
    traced = fx.symbolic_trace(model)
    assert traced.linear is model.linear
    assert traced.weight is model.weight
    assert traced.offset is model.offset


def test_training_flag_is_taken_over(fx: ModuleType) -> None:
    assert fx.symbolic_trace(Affine().eval()).training is False
    assert fx.symbolic_trace(Affine().train()).training is True


def test_the_original_is_left_usable(fx: ModuleType) -> None:
    model = Affine()
    x = torch.rand(3, 4)
    before = model(x)
    fx.symbolic_trace(model)
    assert torch.equal(model(x), before)
    assert sorted(model.state_dict()) == ["linear.bias", "linear.weight", "offset", "weight"]


def test_one_parameter_is_fetched_once(fx: ModuleType) -> None:
    class TwiceTheWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.weight + self.weight

    traced = fx.symbolic_trace(TwiceTheWeight())
    assert len(traced.graph.find_nodes(op="get_attr")) == 1


def test_weight_inside_a_submodule_is_fetched_by_its_path(fx: ModuleType) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

        def forward(self, x):
            return self.body(x) @ self.body[0].weight

    model = Tied()
    traced = fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.find_nodes(op="get_attr")] == ["body.0.weight"]
    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == ["body.0", "body.1"]
    x = torch.rand(2, 3)
    assert torch.equal(traced(x), model(x))


def test_user_modules_are_traced_through(fx: ModuleType) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(x) + 1

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Inner()
            self.second = Inner()

        def forward(self, x):
            return self.second(self.first(x))

    traced = fx.symbolic_trace(Outer())
    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == ["first.act", "second.act"]


def test_shared_submodule_is_called_under_its_first_name_found(fx: ModuleType) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2)
            self.two = self.one

        def forward(self, x):
            return self.two(self.one(x))

    model = Shared()
    traced = fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == ["one", "one"]
    x = torch.rand(1, 2)
    assert torch.equal(traced(x), model(x))


def test_loops_over_module_lists_unroll(fx: ModuleType) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.heads = nn.ModuleDict({"left": nn.ReLU(), "right": nn.Tanh()})

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return {name: head(x) for name, head in self.heads.items()}

    model = Stack()
    traced = fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == [
        "layers.0", "layers.1", "layers.2", "heads.left", "heads.right",
    ]  # fmt: skip
    x = torch.rand(1, 2)
    expected = model(x)
    answer = traced(x)
    assert list(answer) == ["left", "right"]
    assert all(torch.equal(answer[key], expected[key]) for key in expected)


def test_static_control_flow_is_decided_at_trace_time(fx: ModuleType) -> None:
    class Optional(nn.Module):
        def __init__(self, do_activation: bool = False) -> None:
            super().__init__()
            self.do_activation = do_activation
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            x = self.linear(x)
            if self.do_activation:
                x = torch.relu(x)
            return x

    without = fx.symbolic_trace(Optional(False))
    assert "relu" not in without.code
    assert "torch.relu" in fx.symbolic_trace(Optional(True)).code


def test_functions_of_torch_keep_their_targets(fx: ModuleType) -> None:
    def forward(x):
        return functional.gelu(torch.relu(x)).neg()

    traced = fx.symbolic_trace(forward)
    targets = [node.target for node in traced.graph.nodes]
    assert targets == ["x", torch.relu, functional.gelu, "neg", "output"]


def test_nested_lists_of_values_reach_torch_functions(fx: ModuleType) -> None:
    def forward(x, y):
        return torch.cat([x, torch.stack((y, y))], dim=0)

    traced = fx.symbolic_trace(forward)
    stack = traced.graph.find_nodes(op="call_function", target=torch.stack)[0]
    cat = traced.graph.find_nodes(op="call_function", target=torch.cat)[0]
    x, y = traced.graph.find_nodes(op="placeholder")
    assert stack.args == ((y, y),)
    assert cat.args == ([x, stack],)
    assert cat.kwargs == {"dim": 0}
    a, b = torch.ones(1, 3), torch.zeros(3)
    assert torch.equal(traced(a, b), forward(a, b))


def test_structures_of_results_are_kept(fx: ModuleType) -> None:
    def forward(x):
        return {"sum": x + 1, "list": [x, (x * 2, None)], "number": 3}

    traced = fx.symbolic_trace(forward)
    answer = traced(torch.tensor(2.0))
    assert answer["sum"] == 3.0
    assert answer["number"] == 3
    assert answer["list"][0] == 2.0
    assert answer["list"][1][0] == 4.0
    assert answer["list"][1][1] is None


def test_a_constant_may_be_returned(fx: ModuleType) -> None:
    def forward(x):
        return 5

    assert fx.symbolic_trace(forward)(torch.ones(1)) == 5


def test_no_arguments_and_no_result(fx: ModuleType) -> None:
    def forward():
        return None

    traced = fx.symbolic_trace(forward)
    assert opcodes(traced.graph) == ["output"]
    assert traced() is None


def test_annotations_become_node_types(fx: ModuleType) -> None:
    def forward(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    traced = fx.symbolic_trace(forward)
    x, scale = traced.graph.find_nodes(op="placeholder")
    assert x.type is torch.Tensor
    assert scale.type is float
    assert traced.graph.output_node().type is torch.Tensor


def test_default_values_live_in_the_placeholders(fx: ModuleType) -> None:
    def forward(x, scale=2.0, bias=None):
        return x * scale

    traced = fx.symbolic_trace(forward)
    x, scale, bias = traced.graph.find_nodes(op="placeholder")
    assert x.args == ()
    assert scale.args == (2.0,)
    assert bias.args == (None,)
    assert traced(3.0) == 6.0
    assert traced(3.0, 3.0) == 9.0
    assert traced(3.0, scale=4.0) == 12.0


def test_keyword_only_parameters(fx: ModuleType) -> None:
    def forward(x, *, scale, offset=1):
        return x * scale + offset

    traced = fx.symbolic_trace(forward)
    assert [node.target for node in traced.graph.find_nodes(op="placeholder")] == ["x", "scale", "offset"]
    assert traced(2, scale=3) == 7
    assert traced(2, scale=3, offset=0) == 6


def test_positional_varargs_are_one_starred_placeholder(fx: ModuleType) -> None:
    def forward(x, *rest):
        return x + rest[0] * rest[1]

    traced = fx.symbolic_trace(forward)
    assert [node.target for node in traced.graph.find_nodes(op="placeholder")] == ["x", "*rest"]
    assert [node.name for node in traced.graph.find_nodes(op="placeholder")] == ["x", "_rest"]
    assert traced(1, 2, 3) == 7


def test_keyword_varargs_are_one_double_starred_placeholder(fx: ModuleType) -> None:
    def forward(x, **options):
        return x + options["offset"]

    traced = fx.symbolic_trace(forward)
    assert [node.target for node in traced.graph.find_nodes(op="placeholder")] == ["x", "**options"]
    assert traced(1, offset=2) == 3


def test_positional_and_both_kinds_of_varargs_at_once(fx: ModuleType) -> None:
    class Everything(nn.Module):
        def forward(self, x, y=2, *rest, **options):
            return x + y + rest[0] + options["offset"]

    traced = fx.symbolic_trace(Everything())
    assert traced(1, 2, 10, offset=1000) == 1013


def test_forward_decorated_with_wraps_shows_the_inner_signature(fx: ModuleType) -> None:
    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Decorated(nn.Module):
        @logged
        def forward(self, x, y):
            return x - y

    traced = fx.symbolic_trace(Decorated())
    assert [node.target for node in traced.graph.find_nodes(op="placeholder")] == ["x", "y"]
    assert traced(5, 3) == 2


def test_lambda_can_be_traced(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: x + 1)
    assert traced(1) == 2


def test_closures_are_baked(fx: ModuleType) -> None:
    factor = 3

    def forward(x):
        return x * factor

    assert fx.symbolic_trace(forward)(2) == 6


def test_math_functions_are_recorded_by_default(fx: ModuleType) -> None:
    def forward(x):
        return math.sqrt(x) + math.pi

    traced = fx.symbolic_trace(forward)
    assert traced.graph.find_nodes(op="call_function", target=math.sqrt)
    assert traced(4.0) == 2.0 + math.pi
    assert math.sqrt(9.0) == 3.0, "outside of a trace math is itself"


def test_graph_module_can_be_traced_again(fx: ModuleType) -> None:
    model = Affine()
    once = fx.symbolic_trace(model)
    twice = fx.symbolic_trace(once)
    assert twice.code == once.code
    x = torch.rand(3, 4)
    assert torch.equal(twice(x), model(x))


def test_sequential_is_traced_through_and_other_torch_modules_are_not(fx: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()), nn.BatchNorm1d(2))
    traced = fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == ["0", "1.0", "2"]
    x = torch.rand(4, 2)
    model.eval(), traced.eval()
    assert torch.equal(traced(x), model(x))


def test_module_names_that_are_not_identifiers(fx: ModuleType) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0-first", nn.ReLU())

        def forward(self, x):
            return getattr(self, "0-first")(x)

    traced = fx.symbolic_trace(Odd())
    (node,) = traced.graph.find_nodes(op="call_module")
    assert node.target == "0-first"
    assert node.name == "_0_first"
    assert torch.equal(traced(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_tracing_needs_no_inputs_and_does_no_arithmetic(fx: ModuleType) -> None:
    seen = []

    def forward(x):
        seen.append(type(x))
        return x @ x

    fx.symbolic_trace(forward)
    assert seen == [fx.Proxy]


def test_an_exception_in_forward_passes_through(fx: ModuleType) -> None:
    def forward(x):
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        fx.symbolic_trace(forward)
    assert fx.symbolic_trace(lambda x: x + 1)(1) == 2, "a failed trace leaves nothing behind"


def test_module_calls_work_after_a_failed_trace(fx: ModuleType) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            self.linear(x)
            raise RuntimeError("stop")

    model = Failing()
    with pytest.raises(RuntimeError, match="stop"):
        fx.symbolic_trace(model)
    assert isinstance(model.linear(torch.ones(1, 2)), torch.Tensor)
    assert isinstance(model.linear.weight, nn.Parameter)


def test_random_tensor_attribute_is_fetched_not_copied(fx: ModuleType) -> None:
    class PlainTensor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(3.0)

        def forward(self, x):
            return x + self.table

    model = PlainTensor()
    traced = fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.find_nodes(op="get_attr")] == ["table"]
    assert torch.equal(traced(torch.ones(3)), model(torch.ones(3)))


def test_tensor_constant_is_stored_on_the_module(fx: ModuleType) -> None:
    constant = torch.arange(3.0)

    def forward(x):
        return x + constant

    traced = fx.symbolic_trace(forward)
    (node,) = traced.graph.find_nodes(op="get_attr")
    assert node.target == "_tensor_constant0"
    assert torch.equal(traced(torch.ones(3)), torch.ones(3) + constant)


def test_symbolic_trace_as_a_program_would_import_it(port) -> None:
    program = port("""
        import torch
        import torch.fx
        from torch.fx import symbolic_trace, GraphModule, Graph, Node, Proxy, Tracer, Interpreter, Transformer

        def forward(x):
            return torch.relu(x)

        traced: GraphModule = symbolic_trace(forward)
        again: torch.fx.GraphModule = torch.fx.symbolic_trace(traced)
    """)
    assert isinstance(program.traced, program.GraphModule)
    assert program.again.code == program.traced.code
