"""What libraries ask of torch.fx beyond its documentation, in small tracers and passes written in their manner.

Each runs on both libraries; the names alone are in test_module_paths.
"""

import operator
from types import ModuleType

import pytest
import torch
from torch import nn

TRACED = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return torch.relu(self.linear(x)) * self.scale

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Block()
            self.second = nn.Sequential(Block(), nn.ReLU())

        def forward(self, x):
            return self.second(self.first(x)) + 1
"""


def names(graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_feature_extraction_overrides_create_proxy_as_it_was(port) -> None:
    program = port(
        TRACED
        + """
    import torch.fx as fx

    class NodePaths(fx.Tracer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.current = ""
            self.paths = {}

        def call_module(self, m, forward, args, kwargs):
            before = self.current
            try:
                self.current = self.path_of_module(m)
                if not self.is_leaf_module(m, self.current):
                    return forward(*args, **kwargs)
                return self.create_proxy("call_module", self.current, args, kwargs)
            finally:
                self.current = before

        def create_proxy(self, kind, target, args, kwargs, name=None, type_expr=None, *_):
            proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr)
            self.paths[proxy.node.name] = self.current
            return proxy

    tracer = NodePaths(param_shapes_constant=True)
    graph = tracer.trace(Network())
    """
    )
    assert program.tracer.paths["second_0_linear"] == "second.0.linear"
    assert program.tracer.paths["relu_1"] == "second.0"
    assert program.tracer.paths["add"] == ""


def test_quantization_keeps_a_scope_of_its_own(port) -> None:
    program = port(
        TRACED
        + """
    from torch.fx import Tracer
    from torch.fx.proxy import Scope

    class Inside:
        def __init__(self, scope, module, path):
            self.scope, self.before = scope, (scope.module_path, scope.module_type)
            scope.module_path, scope.module_type = path, type(module)

        def __enter__(self):
            return self

        def __exit__(self, *details):
            self.scope.module_path, self.scope.module_type = self.before

    class Quantizing(Tracer):
        def __init__(self):
            super().__init__()
            self.scope = Scope("", None)
            self.node_name_to_scope = {}
            self.record_stack_traces = True

        def is_leaf_module(self, m, module_qualified_name):
            return m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)

        def call_module(self, m, forward, args, kwargs):
            with Inside(self.scope, m, self.path_of_module(m)):
                return super().call_module(m, forward, args, kwargs)

        def create_node(self, kind, target, args, kwargs, name=None, type_expr=None):
            node = super().create_node(kind, target, args, kwargs, name, type_expr)
            self.node_name_to_scope[node.name] = (self.scope.module_path, self.scope.module_type)
            return node

    tracer = Quantizing()
    scope, scopes = tracer.scope, tracer.node_name_to_scope
    graph = tracer.trace(Network())
    """
    )
    assert program.tracer.scope is program.scope and program.tracer.node_name_to_scope is program.scopes
    assert program.scopes["first_linear"] == ("first.linear", nn.Linear)
    assert program.scopes["relu_1"] == ("second.0", program.Block)
    assert program.scopes["add"] == program.scopes["output"] == ("", None)
    assert (program.scope.module_path, program.scope.module_type) == ("", None)


def test_the_state_of_a_tracer_is_live(port) -> None:
    program = port(
        TRACED
        + """
    import torch.fx as fx

    class Watching(fx.Tracer):
        def create_node(self, kind, target, args, kwargs, name=None, type_expr=None):
            seen.append((stack is self.module_stack, scope.module_path, list(stack)))
            return super().create_node(kind, target, args, kwargs, name, type_expr)

    seen = []
    tracer = Watching()
    stack, scope, scopes = tracer.module_stack, tracer.scope, tracer.node_name_to_scope
    graph = tracer.trace(Network())
    """
    )
    assert all(is_same for is_same, _, _ in program.seen)
    assert ("second.0", ["second", "second.0"]) in [(path, stack) for _, path, stack in program.seen]
    assert not program.stack
    assert program.scopes["relu_1"] == ("second.0", program.Block)
    relu = next(node for node in program.graph.nodes if node.name == "relu_1")
    assert list(relu.meta["nn_module_stack"]) == ["second", "second.0"]


def test_what_a_subclass_writes_onto_the_stack_is_on_the_nodes(port) -> None:
    program = port(
        TRACED
        + """
    import torch.fx as fx

    class Renaming(fx.Tracer):
        def call_module(self, m, forward, args, kwargs):
            key = "around " + self.path_of_module(m)
            self.module_stack[key] = ("around", type(m))
            try:
                return super().call_module(m, forward, args, kwargs)
            finally:
                self.module_stack.pop(key)

    graph = Renaming().trace(Network())
    """
    )
    relu = next(node for node in program.graph.nodes if node.name == "relu")
    assert list(relu.meta["nn_module_stack"]) == ["around first", "first"]


def test_a_tracer_installs_modules_that_the_model_does_not_own(port) -> None:
    program = port("""
        import torch
        import torch.fx as fx
        from torch import nn

        class Hidden(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden = [nn.Linear(2, 2)]

            def forward(self, x):
                return self.hidden[0](x)

        class Installing(fx.Tracer):
            def path_of_module(self, mod):
                try:
                    return super().path_of_module(mod)
                except NameError:
                    self.root.add_module("found", mod)
                    self.submodule_paths[mod] = "found"
                    return "found"

        model = Hidden()
        graph = Installing().trace(model)
        traced = fx.GraphModule(model, graph)
    """)
    x = torch.rand(1, 2)
    assert [node.target for node in program.graph.find_nodes(op="call_module")] == ["found"]
    assert torch.equal(program.traced(x), program.model(x))


def test_answers_that_torch_fx_refuses(port) -> None:
    program = port("""
        import torch.fx as fx

        class Answering(fx.Tracer):
            def to_bool(self, obj):
                return True

            def iter(self, obj):
                return iter([obj[0], obj[1]])

            def keys(self, obj):
                return ["a"]

        def function(x, options):
            first, *rest = [item for item in x]
            return dict(**options)["a"] + first if x > 0 else rest

        graph = Answering().trace(function)
    """)
    assert sorted(names(program.graph)) == ["add", "getitem", "getitem_1", "getitem_2", "gt", "options", "output", "x"]


def test_tensors_that_a_tracer_knows_by_another_path(port) -> None:
    program = port("""
        import torch
        import torch.fx as fx
        from torch import nn

        outside = torch.ones(2)

        class Knowing(fx.Tracer):
            def create_arg(self, a):
                if a is outside:
                    self.tensor_attrs[a] = "known"
                return super().create_arg(a)

        graph = Knowing().trace(lambda x: torch.add(x, outside))
    """)
    assert [node.target for node in program.graph.find_nodes(op="get_attr")] == ["known"]


def test_a_tracer_finds_its_functions_by_their_ids(port) -> None:
    program = port("""
        import math
        import torch.fx as fx

        def opaque(x):
            return x if x > 0 else -x

        class Wrapping(fx.Tracer):
            def __init__(self):
                super().__init__()
                self._autowrap_function_ids.add(id(opaque))

        tracer = Wrapping()
        graph = tracer.trace(lambda x: opaque(x) + math.sqrt(x))
    """)
    assert names(program.graph) == ["x", "opaque", "sqrt", "add", "output"]
    assert [module.__name__ for module in program.tracer._autowrap_search] == ["math"]


def test_a_trace_that_is_written_with_the_tools_of_tracing(port) -> None:
    program = port(
        TRACED
        + """
    import math
    import torch.fx._symbolic_trace as st
    from torch.fx import Graph, GraphModule, Tracer, wrap

    @wrap
    def leaf(x):
        return x if x > 0 else -x

    class Own(Tracer):
        def trace(self, root, concrete_args=None):
            self.root, function = root, type(root).forward
            self.submodule_paths = {module: name for name, module in root.named_modules()}
            self.graph = Graph(tracer_cls=type(self))
            self.tensor_attrs = {}
            function, args = self.create_args_for_root(function, True, concrete_args)
            cache = {}

            def read(module, name):
                return self.getattr(name, st._orig_module_getattr(module, name), cache)

            def call(module, *args, **kwargs):
                def forward(*args, **kwargs):
                    return st._orig_module_call(module, *args, **kwargs)

                st._autowrap_check(patcher, type(module).forward.__globals__, self._autowrap_function_ids)
                return self.call_module(module, forward, args, kwargs)

            with st._Patcher() as patcher:
                patcher.patch_method(nn.Module, "__getattr__", read, deduplicate=False)
                patcher.patch_method(nn.Module, "__call__", call, deduplicate=False)
                st._patch_wrapped_functions(patcher)
                for module in self._autowrap_search:
                    st._autowrap_check(patcher, module.__dict__, self._autowrap_function_ids)
                self.create_node("output", "output", (self.create_arg(function(*args)),), {})
            self.submodule_paths = None
            return self.graph

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Network()

        def forward(self, x):
            return leaf(self.inner(x)).sum() + math.floor(x)

    model = Whole()
    before = nn.Module.__call__, nn.Module.__getattr__, math.floor
    graph = Own().trace(model)
    after = nn.Module.__call__, nn.Module.__getattr__, math.floor
    """
    )
    assert program.before == program.after
    assert names(program.graph)[:4] == ["x", "inner_first_linear", "relu", "inner_first_scale"]
    assert names(program.graph)[-4:] == ["sum_1", "floor", "add_1", "output"]
    assert program.graph.find_nodes(op="call_function", target=program.leaf)


def test_proxies_that_are_made_from_the_tables_of_operators(port) -> None:
    program = port("""
        import operator
        from torch.fx.graph import inplace_methods, magic_methods, reflectable_magic_methods
        from torch.fx.proxy import base_types

        shown = {name: text.format("a", "b", "c") for name, text in {**magic_methods, **inplace_methods}.items()}
        reflected = sorted(reflectable_magic_methods)
    """)
    assert program.shown["add"] == "a + b" and program.shown["neg"] == "-a" and program.shown["iadd"] == "a += b"
    assert program.shown["setitem"] == "a[b] = c"
    only_first = {"eq", "ne", "lt", "gt", "le", "ge", "pos", "neg", "invert"}
    assert program.reflected == sorted(program.magic_methods.keys() - only_first)
    assert {int, float, bool, str, torch.dtype} <= set(program.base_types)


def test_names_of_functions_and_effects(port) -> None:
    program = port("""
        import operator
        import torch
        import torch.fx as fx
        from torch.fx.node import _format_arg, _get_qualified_name, _side_effectful_functions, _type_repr

        def observe(x):
            return x

        found = [_get_qualified_name(item) for item in (torch.relu, operator.add, len, torch.ops.aten.add.Tensor)]
        _side_effectful_functions.add(observe)
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.call_function(observe, (x,))
        graph.call_function(torch.relu, (x,))
        graph.output(x)
        graph.eliminate_dead_code()
        _side_effectful_functions.remove(observe)
    """)
    assert program.found == ["torch.relu", "_operator.add", "len", "torch.ops.aten.add.Tensor"]
    assert names(program.graph) == ["x", "observe", "output"]
    assert program._type_repr(torch.Tensor) == "torch.Tensor" and program._type_repr(int) == "int"
    assert program._format_arg((program.x, [1])) == "(%x, [1])"


def test_a_graph_module_that_is_put_together_by_hand(port) -> None:
    program = port(
        TRACED
        + """
    import copy
    import torch.fx as fx
    from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY, _CodeOnlyModule, _copy_attr

    class Two(fx.GraphModule):
        def __init__(self, root, train_graph, eval_graph, class_name="GraphModule"):
            super(fx.GraphModule, self).__init__()
            self.__class__.__name__ = class_name
            self.train_graph, self.eval_graph = train_graph, eval_graph
            for node in [*train_graph.nodes, *eval_graph.nodes]:
                if node.op in ("get_attr", "call_module"):
                    _copy_attr(root, self, node.target)
            self.train()
            self.graph = train_graph
            self._tracer_cls = None

        def train(self, mode=True):
            if mode and not self.training:
                self.graph = self.train_graph
            elif not mode and self.training:
                self.graph = self.eval_graph
            return super().train(mode=mode)

        def __deepcopy__(self, memo):
            made = type(self).__new__(type(self))
            memo[id(self)] = made
            body = _CodeOnlyModule(copy.deepcopy(self.__dict__, memo))
            Two.__init__(made, body, body.__dict__["train_graph"], body.__dict__["eval_graph"])
            return made

    model = Network()
    train_graph = fx.Tracer().trace(model)
    eval_graph = fx.Tracer().trace(model)
    for node in list(eval_graph.nodes):
        if node.name == "add":
            node.replace_all_uses_with(node.args[0])
            eval_graph.erase_node(node)
    both = Two(model, train_graph, eval_graph, "Both")
    copied = copy.deepcopy(both)
    """
    )
    x = torch.rand(2, 3)
    for both in (program.both, program.copied):
        assert torch.equal(both.train()(x), program.model(x))
        assert torch.allclose(both.eval()(x), program.model(x) - 1)
        assert sorted(both.state_dict()) == sorted(program.model.state_dict())
    assert program.copied.first.linear is not program.both.first.linear


def test_a_node_is_given_a_name_that_is_no_identifier(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.cat([x, x]))
    cat = next(node for node in traced.graph.nodes if node.name == "cat")
    cat.name = "cat-3"
    traced.recompile()
    assert "cat_3 = torch.cat([x, x])" in traced.code
    assert torch.equal(traced(torch.ones(1)), torch.ones(2))


def test_models_ask_whether_they_are_traced(port) -> None:
    program = port("""
        import torch
        import torch.fx as fx
        from torch.fx._symbolic_trace import is_fx_symbolic_tracing

        def function(x):
            answers.append(is_fx_symbolic_tracing())
            return torch.relu(x)

        answers = []
        traced = fx.symbolic_trace(function)
        function(torch.ones(1))
    """)
    assert program.answers == [True, False]


def test_an_argument_fixed_to_none_is_checked_by_name(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x, mask: x if mask is None else x * mask, concrete_args={"mask": None})
    (check,) = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert check.target.__name__ == "_assert_is_none"
    assert check.target is fx._symbolic_trace._assert_is_none


@pytest.mark.parametrize("name", ["_has_attr", "_get_attr", "_del_attr", "_assign_attr"])
def test_attributes_by_path(fx: ModuleType, name: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    function = getattr(fx.graph_module, name)
    if name == "_has_attr":
        assert function(model, "0") and not function(model, "1")
    elif name == "_get_attr":
        assert function(model, "0.0.weight") is model[0][0].weight
    elif name == "_del_attr":
        function(model, "0.0.bias")
        assert not hasattr(model[0][0], "bias")
    else:
        function(torch.ones(2), model, "0.new.value")
        assert "0.new.value" in model.state_dict()


def test_what_a_tracer_does_itself_is_neither_recorded_guarded_nor_refused(port) -> None:
    """As HFTracer does: values of tensors without data are computed along, and answer what the model asks."""
    program = port(
        TRACED
        + """
    import torch.fx as fx

    class WithValues(fx.Proxy):
        def __bool__(self):
            return bool(self.known)

        def __getattr__(self, name):
            return fx.proxy.Attribute(self, name)

    def known(value):
        if isinstance(value, int):  # asked of proxies too, from a function that is no method of the tracer
            return value
        return value.known if isinstance(value, WithValues) else value

    class Metas(fx.Tracer):
        def proxy(self, node):
            return WithValues(node, self)

        def create_proxy(self, kind, target, args, kwargs, name=None, type_expr=None, proxy_factory_fn=None):
            result = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
            result.known = torch.zeros(2, 3, device="meta")
            if kind == "call_function" and target is not getattr:
                result.known = torch.relu(torch.ones(1, 3) * 2).to("meta")
                torch.rand(3).add_(1)
            fx.node.map_aggregate(args, known)
            self.root.note = "written while tracing"
            return result

        def path_of_module(self, module):
            try:
                return super().path_of_module(module)
            except NameError:
                self.root.add_module("added", module)
                return "added"

        def to_bool(self, value):
            return True

    class Model(Network):
        def forward(self, x):
            return super().forward(nn.Tanh()(x))

    tracer = Metas()
    graph = tracer.trace(Model())
    module = fx.GraphModule(tracer.root, graph)
    """
    )
    assert names(program.graph) == [
        *("x", "added", "first_linear", "relu", "first_scale", "mul"),
        *("second_0_linear", "relu_1", "second_0_scale", "mul_1", "second_1", "add", "output"),
    ]
    assert program.tracer.root.note == "written while tracing"


def test_in_place_operators_reach_a_tracer_as_plain_ones(port) -> None:
    program = port("""
    import operator
    import torch
    import torch.fx as fx

    class Seeing(fx.Tracer):
        def create_proxy(self, kind, target, args, kwargs, name=None, type_expr=None):
            seen.append(target)
            return super().create_proxy(kind, target, args, kwargs, name, type_expr)

    def function(x):
        y = x + 1
        y += x
        y &= 3
        return y

    seen = []
    graph = Seeing().trace(function)
    """)
    assert program.seen == ["x", operator.add, operator.add, operator.and_]
    assert names(program.graph) == ["x", "add", "add_1", "and_", "output"]


def test_a_trace_of_ones_own_asks_for_annotations(port) -> None:
    program = port(
        TRACED
        + """
    import torch.fx as fx

    class Own(fx.Tracer):
        def trace(self, root, concrete_args=None):
            self.root, self.graph = root, fx.Graph(tracer_cls=type(self))
            function, args = self.create_args_for_root(type(root).forward, True, concrete_args)
            self.annotation = function.__annotations__.get("return")
            return self.graph

    class Annotated(Network):
        def forward(self, x) -> torch.Tensor:
            return x

    tracer = Own()
    tracer.trace(Annotated())
    """
    )
    assert program.tracer.annotation is torch.Tensor


def test_concrete_arguments_may_name_keywords_that_have_no_default(port) -> None:
    program = port("""
    import inspect
    import torch.fx as fx

    def function(x, scale=2, **options):
        return x * scale

    parameters = inspect.signature(function).parameters
    defaults = {name: item.default for name, item in parameters.items() if name != "x"}
    graph = fx.Tracer().trace(function, concrete_args=defaults)
    """)
    assert next(iter(program.graph.nodes)).target == "x"


@pytest.mark.parametrize(
    "asked",
    [
        "self.layer(x)",
        "F.layer_norm(x, (3,))",
        "self.weight",
        "torch.relu(x)",
        "torch.relu(x).view(-1)",
        "torch.relu(x) + 1",
    ],
)
def test_no_guard_where_the_class_of_a_value_cannot_change(port, asked: str) -> None:
    program = port(f"""
    import torch
    import torch.nn.functional as F
    import torch.fx as fx
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.weight = nn.MaxPool1d(1), nn.Parameter(torch.ones(3))

        def forward(self, x):
            y = {asked}
            isinstance(y, torch.Tensor)
            return y

    graph = fx.Tracer().trace(Model())
    """)
    assert "guard" not in names(program.graph)
