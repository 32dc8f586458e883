"""Interpreter: running a graph node by node, and every method of it that may be overridden.

Interpreters that build a new graph are examined in test_transformer.
"""

import operator
import weakref
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, bias=1.0):
        return torch.relu(self.linear(x)).neg() * self.weight + bias


def test_run_gives_what_the_module_gives(fx: ModuleType) -> None:
    model = Model()
    traced = fx.symbolic_trace(model)
    x = torch.rand(2, 3)
    assert torch.equal(fx.Interpreter(traced).run(x), model(x))
    assert torch.equal(fx.Interpreter(traced).run(x, 5.0), model(x, 5.0))


def test_an_interpreter_can_run_twice(fx: ModuleType) -> None:
    interpreter = fx.Interpreter(fx.symbolic_trace(lambda x: x + 1))
    assert interpreter.run(1) == 2
    assert interpreter.run(5) == 6


def test_attributes(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Model())
    interpreter = fx.Interpreter(traced)
    assert interpreter.module is traced
    assert interpreter.graph is traced.graph
    assert interpreter.env == {}
    assert interpreter.garbage_collect_values is True
    assert interpreter.submodules["linear"] is traced.linear


def test_missing_argument_is_told(fx: ModuleType) -> None:
    interpreter = fx.Interpreter(fx.symbolic_trace(lambda x, y: x + y))
    with pytest.raises(RuntimeError, match="y"):
        interpreter.run(1)


def test_starred_placeholder_takes_the_rest(fx: ModuleType) -> None:
    def forward(x, *rest):
        return x, rest

    x, rest = fx.Interpreter(fx.symbolic_trace(forward)).run(1, 2, 3)
    assert x == 1
    assert list(rest) == [2, 3]


def test_swapping_operations_while_running(fx: ModuleType) -> None:
    class NegSigmSwapInterpreter(fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target == torch.sigmoid:
                return torch.neg(*args, **kwargs)
            return super().call_function(target, args, kwargs)

        def call_method(self, target, args, kwargs):
            if target == "neg":
                call_self, *args_tail = args
                return call_self.sigmoid(*args_tail, **kwargs)
            return super().call_method(target, args, kwargs)

    def fn(x):
        return torch.sigmoid(x).neg()

    gm = fx.symbolic_trace(fn)
    input = torch.randn(3, 4)
    result = NegSigmSwapInterpreter(gm).run(input)
    torch.testing.assert_close(result, torch.neg(input).sigmoid())


def test_every_opcode_has_its_method(fx: ModuleType) -> None:
    calls = []

    class Watching(fx.Interpreter):
        def placeholder(self, target, args, kwargs):
            calls.append(("placeholder", target))
            return super().placeholder(target, args, kwargs)

        def get_attr(self, target, args, kwargs):
            calls.append(("get_attr", target))
            return super().get_attr(target, args, kwargs)

        def call_function(self, target, args, kwargs):
            calls.append(("call_function", target))
            return super().call_function(target, args, kwargs)

        def call_method(self, target, args, kwargs):
            calls.append(("call_method", target))
            return super().call_method(target, args, kwargs)

        def call_module(self, target, args, kwargs):
            calls.append(("call_module", target))
            return super().call_module(target, args, kwargs)

        def output(self, target, args, kwargs):
            calls.append(("output", target))
            return super().output(target, args, kwargs)

    traced = fx.symbolic_trace(Model())
    Watching(traced).run(torch.rand(1, 3))
    assert calls == [(node.op, node.target) for node in traced.graph.nodes]


def test_methods_get_real_values(fx: ModuleType) -> None:
    seen = {}

    class Watching(fx.Interpreter):
        def call_function(self, target, args, kwargs):
            seen[target] = (args, kwargs)
            return super().call_function(target, args, kwargs)

    traced = fx.symbolic_trace(lambda x, y: torch.cat([x, y], dim=0))
    x = torch.ones(1)
    Watching(traced).run(x, x)
    args, kwargs = seen[torch.cat]
    assert isinstance(args, tuple)
    assert args[0][0] is x
    assert kwargs == {"dim": 0}


def test_run_node_sees_every_node(fx: ModuleType) -> None:
    class Recorder(fx.Interpreter):
        def __init__(self, module) -> None:
            super().__init__(module)
            self.values = {}

        def run_node(self, n):
            result = super().run_node(n)
            self.values[n.name] = result
            return result

    traced = fx.symbolic_trace(lambda x: (x + 1) * 2)
    recorder = Recorder(traced)
    recorder.run(3)
    assert recorder.values == {"x": 3, "add": 4, "mul": 8, "output": 8}


def test_call_module_can_be_overridden(fx: ModuleType) -> None:
    class Zeroing(fx.Interpreter):
        def call_module(self, target, args, kwargs):
            return torch.zeros_like(super().call_module(target, args, kwargs))

    traced = fx.symbolic_trace(Model())
    assert torch.equal(Zeroing(traced).run(torch.rand(1, 3)), torch.ones(1, 3))


def test_values_are_let_go_after_their_last_use(fx: ModuleType) -> None:
    alive = []

    class Watching(fx.Interpreter):
        def run_node(self, n):
            alive.append(sorted(node.name for node in self.env))
            return super().run_node(n)

    traced = fx.symbolic_trace(lambda x: ((x + 1) * 2).neg())
    Watching(traced).run(torch.ones(1))
    assert alive == [[], ["x"], ["add"], ["mul"], ["neg"]]


def test_memory_of_values_is_freed_while_running(fx: ModuleType) -> None:
    references = []
    freed = []

    def make(x):
        value = torch.ones(2)
        references.append(weakref.ref(value))
        return value

    def consume(value):
        return 1

    def check(x):
        freed.append(references[0]() is None)
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(make, (x,))
    consumed = graph.call_function(consume, (made,))
    graph.output(graph.call_function(check, (consumed,)))
    fx.Interpreter(fx.GraphModule({}, graph)).run(0)
    assert freed == [True]


def test_all_values_can_be_kept(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: (x + 1) * 2)
    interpreter = fx.Interpreter(traced, garbage_collect_values=False)
    interpreter.run(3)
    assert {node.name: value for node, value in interpreter.env.items()} == {"x": 3, "add": 4, "mul": 8, "output": 8}


def test_initial_values_replace_computing(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: (x + 1) * 2)
    (add,) = traced.graph.find_nodes(op="call_function", target=operator.add)
    assert fx.Interpreter(traced, garbage_collect_values=False).run(3, initial_env={add: 100}) == 200


def test_boxed_run_empties_its_list(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x, y: x - y)
    arguments = [5, 3]
    assert fx.Interpreter(traced).boxed_run(arguments) == 2
    assert arguments == []


def test_boxed_run_counts_its_arguments(fx: ModuleType) -> None:
    interpreter = fx.Interpreter(fx.symbolic_trace(lambda x, y: x - y))
    with pytest.raises(RuntimeError, match="2"):
        interpreter.boxed_run([1])
    with pytest.raises(RuntimeError, match="2"):
        interpreter.boxed_run([1, 2, 3])


def test_another_graph_with_the_state_of_a_module(fx: ModuleType) -> None:
    root = nn.Module()
    root.layer = nn.Linear(2, 2)
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    x = torch.rand(1, 2)
    assert torch.equal(fx.Interpreter(root, graph=graph).run(x), root.layer(x))


def test_fetch_attr(fx: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    interpreter = fx.Interpreter(fx.symbolic_trace(model))
    assert interpreter.fetch_attr("0.weight") is model[0].weight
    with pytest.raises((RuntimeError, AttributeError), match="absent"):
        interpreter.fetch_attr("0.absent")


def test_fetch_args_kwargs_from_env(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x, y: x.add([y, 1], alpha=y))
    interpreter = fx.Interpreter(traced)
    x, y, add, _ = traced.graph.nodes
    interpreter.env = {x: "X", y: "Y"}
    args, kwargs = interpreter.fetch_args_kwargs_from_env(add)
    assert args == ("X", ["Y", 1])
    assert kwargs == {"alpha": "Y"}


def test_map_nodes_to_values(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x, y: x + y)
    interpreter = fx.Interpreter(traced)
    x, y, add, _ = traced.graph.nodes
    interpreter.env = {x: 1}
    assert interpreter.map_nodes_to_values([x, {"k": (x, "s")}], add) == [1, {"k": (1, "s")}]
    with pytest.raises(RuntimeError, match="y"):
        interpreter.map_nodes_to_values((x, y), add)


def test_errors_name_the_node(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.cat([x, x], dim=7))
    with pytest.raises(IndexError, match="(?s)Dimension out of range.*cat"):
        fx.Interpreter(traced).run(torch.ones(2))


def test_none_may_be_a_result(fx: ModuleType) -> None:
    def forward(x):
        return None

    assert fx.Interpreter(fx.symbolic_trace(forward)).run(1) is None


def test_graph_without_output_runs_to_its_end(fx: ModuleType) -> None:
    seen = []
    graph = fx.Graph()
    graph.call_function(seen.append, (graph.placeholder("x"),))
    assert fx.Interpreter(nn.Module(), graph=graph).run(3) is None
    assert seen == [3]


def test_profiling_interpreter_of_the_tutorial(port) -> None:
    program = port("""
        import time
        from typing import Any, Dict, List, Tuple, Union

        import torch
        import torch.fx
        from torch.fx import Interpreter

        class ProfilingInterpreter(Interpreter):
            def __init__(self, mod : torch.nn.Module):
                gm = torch.fx.symbolic_trace(mod)
                super().__init__(gm)
                self.total_runtime_sec : List[float] = []
                self.runtimes_sec : Dict[torch.fx.Node, List[float]] = {}

            def run(self, *args) -> Any:
                t_start = time.time()
                return_val = super().run(*args)
                t_end = time.time()
                self.total_runtime_sec.append(t_end - t_start)
                return return_val

            def run_node(self, n : torch.fx.Node) -> Any:
                t_start = time.time()
                return_val = super().run_node(n)
                t_end = time.time()
                self.runtimes_sec.setdefault(n, [])
                self.runtimes_sec[n].append(t_end - t_start)
                return return_val
    """)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    interpreter = program.ProfilingInterpreter(model)
    x = torch.rand(1, 2)
    assert torch.equal(interpreter.run(x), model(x))
    interpreter.run(x)
    assert len(interpreter.total_runtime_sec) == 2
    assert [len(times) for times in interpreter.runtimes_sec.values()] == [2, 2, 2, 2]


def test_shape_propagation_of_the_documentation(fx: ModuleType, port) -> None:
    program = port("""
        import torch
        import torch.fx
        from torch.fx.node import Node

        from typing import Dict

        class ShapeProp:
            def __init__(self, mod):
                self.mod = mod
                self.graph = mod.graph
                self.modules = dict(self.mod.named_modules())

            def propagate(self, *args):
                args_iter = iter(args)
                env : Dict[str, Node] = {}

                def load_arg(a):
                    return torch.fx.graph.map_arg(a, lambda n: env[n.name])

                def fetch_attr(target : str):
                    target_atoms = target.split('.')
                    attr_itr = self.mod
                    for i, atom in enumerate(target_atoms):
                        if not hasattr(attr_itr, atom):
                            raise RuntimeError(f"Node referenced nonexistent target {'.'.join(target_atoms[:i])}")
                        attr_itr = getattr(attr_itr, atom)
                    return attr_itr

                for node in self.graph.nodes:
                    if node.op == 'placeholder':
                        result = next(args_iter)
                    elif node.op == 'get_attr':
                        result = fetch_attr(node.target)
                    elif node.op == 'call_function':
                        result = node.target(*load_arg(node.args), **load_arg(node.kwargs))
                    elif node.op == 'call_method':
                        self_obj, *args = load_arg(node.args)
                        kwargs = load_arg(node.kwargs)
                        result = getattr(self_obj, node.target)(*args, **kwargs)
                    elif node.op == 'call_module':
                        result = self.modules[node.target](*load_arg(node.args), **load_arg(node.kwargs))

                    if isinstance(result, torch.Tensor):
                        node.shape = result.shape
                        node.dtype = result.dtype

                    env[node.name] = result

                return load_arg(self.graph.result) if hasattr(self.graph, "result") else result
    """)

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 5)
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return functional.relu(self.linear(x)).sum(dim=0) * self.weight

    module = fx.symbolic_trace(Small())
    program.ShapeProp(module).propagate(torch.rand(2, 3))
    shapes = {node.name: tuple(node.shape) for node in module.graph.nodes if node.op != "output"}
    assert shapes == {"x": (2, 3), "linear": (2, 5), "relu": (2, 5), "sum_1": (5,), "weight": (5,), "mul": (5,)}
    assert all(node.dtype is torch.float32 for node in module.graph.nodes if node.op != "output")
