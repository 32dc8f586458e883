"""The samples of torch.fx's official documentation and tutorials, changed in nothing but their import.

Samples shown in the docstrings of Interpreter, Transformer and the rewriter stand with their subjects.
"""

import math

import torch
from torch import nn


def test_front_page_sample(port) -> None:
    program = port("""
        import torch

        # Simple module for demonstration
        class MyModule(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.param = torch.nn.Parameter(torch.rand(3, 4))
                self.linear = torch.nn.Linear(4, 5)

            def forward(self, x):
                return self.linear(x + self.param).clamp(min=0.0, max=1.0)

        module = MyModule()

        from torch.fx import symbolic_trace
        import torch.fx

        # Symbolic tracing frontend - captures the semantics of the module
        symbolic_traced: torch.fx.GraphModule = symbolic_trace(module)
    """)
    assert program.symbolic_traced.code.strip().splitlines() == [
        "def forward(self, x):",
        "    param = self.param",
        "    add = x + param;  x = param = None",
        "    linear = self.linear(add);  add = None",
        "    clamp = linear.clamp(min = 0.0, max = 1.0);  linear = None",
        "    return clamp",
    ]
    x = torch.rand(3, 4)
    assert torch.equal(program.symbolic_traced(x), program.module(x))


def test_a_transform_in_three_steps(port) -> None:
    program = port("""
        import torch
        import torch.fx

        def transform(m: torch.nn.Module,
                      tracer_class : type = torch.fx.Tracer) -> torch.nn.Module:
            # Step 1: Acquire a Graph representing the code in `m`
            graph : torch.fx.Graph = tracer_class().trace(m)

            # Step 2: Modify this Graph or create a new one
            for node in graph.nodes:
                if node.target == torch.relu:
                    node.target = torch.neg

            # Step 3: Construct a Module to return
            return torch.fx.GraphModule(m, graph)

        def transform_in_place(m : torch.nn.Module) -> torch.nn.Module:
            gm : torch.fx.GraphModule = torch.fx.symbolic_trace(m)
            # Modify gm.graph
            for node in gm.graph.nodes:
                if node.target == torch.relu:
                    node.target = torch.neg
            # Recompile the forward() method of `gm` from its Graph
            gm.recompile()
            return gm

        class M(torch.nn.Module):
            def forward(self, x):
                return torch.relu(x)
    """)
    x = torch.tensor(3.0)
    assert program.transform(program.M())(x).item() == -3.0
    assert program.transform_in_place(program.M())(x).item() == -3.0


def test_custom_tracer_of_the_documentation(port) -> None:
    program = port("""
        import torch
        import torch.fx as fx

        class MyCustomTracer(fx.Tracer):
            # Inside here you can override various methods
            # to customize tracing. See the `Tracer` API
            # reference
            pass

        # Let's use this custom tracer to trace through this module
        class MyModule(torch.nn.Module):
            def forward(self, x):
                return torch.relu(x) + torch.ones(3, 4)

        mod = MyModule()
        traced_graph = MyCustomTracer().trace(mod)
        # trace() returns a Graph. Let's wrap it up in a
        # GraphModule to make it runnable
        traced = fx.GraphModule(mod, traced_graph)
    """)
    x = torch.randn(3, 4)
    assert torch.equal(program.traced(x), program.mod(x))


def test_leaf_modules_of_the_documentation(port) -> None:
    program = port("""
        import torch
        import torch.fx

        class MySpecialSubmodule(torch.nn.Module):
            def forward(self, x):
                return torch.neg(x)

        class MyModule(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(3, 4)
                self.submod = MySpecialSubmodule()

            def forward(self, x):
                return self.submod(self.linear(x))

        traced = torch.fx.symbolic_trace(MyModule())
    """)
    assert program.traced.code.strip().splitlines() == [
        "def forward(self, x):",
        "    linear = self.linear(x);  x = None",
        "    neg = torch.neg(linear);  linear = None",
        "    return neg",
    ]


def test_wrapped_builtins_of_the_documentation(port) -> None:
    program = port("""
        import torch
        import torch.fx

        torch.fx.wrap('len')
        from math import sqrt
        torch.fx.wrap('sqrt')

        def normalize(x):
            return x / sqrt(len(x))

        traced = torch.fx.symbolic_trace(normalize)
    """)
    assert [node.target for node in program.traced.graph.nodes][1:3] == [len, math.sqrt]
    assert program.traced(torch.ones(4)).tolist() == [0.5] * 4


def test_device_of_factories_follows_the_input(port) -> None:
    program = port("""
        import torch
        import torch.fx

        @torch.fx.wrap
        def torch_randn(x, shape):
            return torch.randn(shape)

        def f(x):
            return x + torch_randn(x, 5)

        traced = torch.fx.symbolic_trace(f)
    """)
    assert not torch.equal(program.traced(torch.zeros(5)), program.traced(torch.zeros(5)))


def test_dynamic_control_flow_of_the_documentation(port) -> None:
    program = port("""
        import torch
        import torch.fx

        def func_to_trace(x):
            if x.sum() > 0:
                return torch.relu(x)
            else:
                return torch.neg(x)

        try:
            traced = torch.fx.symbolic_trace(func_to_trace)
            error = None
        except torch.fx.proxy.TraceError as raised:
            error = raised
    """)
    assert program.error is not None


def test_replacing_one_operator(port) -> None:
    program = port("""
        import torch
        from torch.fx import symbolic_trace
        import operator

        # Sample module
        class M(torch.nn.Module):
            def forward(self, x, y):
                return x + y, torch.add(x, y), x.add(y)

        # Symbolically trace an instance of the module
        traced = symbolic_trace(M())

        # As demonstrated in the above example, there are several different ways
        # to denote addition. The possible cases are:
        #     1. `x + y` - A `call_function` Node with target `operator.add`.
        #     2. `torch.add(x, y)` - A similar `call_function` Node.
        #     3. `x.add(y)` - The Tensor method call, whose target we can match as a string.
        patterns = set([operator.add, torch.add, "add"])

        # Go through all the nodes in the Graph
        for n in traced.graph.nodes:
            # If the target matches one of the patterns
            if any(n.target == pattern for pattern in patterns):
                # Set the insert point, add the new node, and replace all uses
                # of `n` with the new node
                with traced.graph.inserting_after(n):
                    new_node = traced.graph.call_function(torch.bitwise_and, n.args, n.kwargs)
                    n.replace_all_uses_with(new_node)
                # Remove the old node from the graph
                traced.graph.erase_node(n)

        # Don't forget to recompile!
        traced.recompile()
    """)
    x, y = torch.tensor(6), torch.tensor(3)
    assert program.traced(x, y) == (2, 2, 2)


def test_graph_from_proxies_of_raw_nodes(port) -> None:
    program = port("""
        import torch
        from torch.fx import Proxy, Graph, GraphModule
        from torch.fx.proxy import GraphAppendingTracer

        # Create a graph independently of symbolic tracing
        graph = Graph()
        tracer = GraphAppendingTracer(graph)

        # Create raw Nodes
        raw1 = graph.placeholder('x')
        raw2 = graph.placeholder('y')

        # Initialize Proxies using the raw Nodes and graph's default tracer
        y = Proxy(raw1, tracer)
        z = Proxy(raw2, tracer)

        # Create other operations using the Proxies `y` and `z`
        a = torch.cat([y, z])
        b = torch.tanh(a)
        c = torch.neg(b)

        # Create a new output Node and add it to the Graph. By doing this, the
        # Graph will contain all the Nodes we just created (since they're all
        # linked to the output Node)
        graph.output(c.node)

        # Wrap our created Graph in a GraphModule to get a final, runnable
        # `nn.Module` instance
        mod = GraphModule(torch.nn.Module(), graph)
    """)
    x = torch.rand(2)
    assert torch.equal(program.mod(x, x), -torch.tanh(torch.cat([x, x])))


def test_swapping_modules_for_functions_and_back(port) -> None:
    program = port("""
        import torch
        import torch.fx

        def swap_relu_modules(model):
            gm = torch.fx.symbolic_trace(model)
            modules = dict(gm.named_modules())
            for node in gm.graph.nodes:
                if node.op == 'call_module' and isinstance(modules[node.target], torch.nn.ReLU):
                    with gm.graph.inserting_after(node):
                        new = gm.graph.call_function(torch.nn.functional.hardtanh, args=node.args,
                                                     kwargs={'min_val': 0.0, 'max_val': 6.0})
                    node.replace_all_uses_with(new)
                    gm.graph.erase_node(node)
            gm.delete_all_unused_submodules()
            gm.recompile()
            return gm
    """)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    swapped = program.swap_relu_modules(model)
    assert [name for name, _ in swapped.named_children()] == ["0", "2"]
    x = torch.rand(1, 2)
    assert torch.equal(swapped(x), model(x).clamp(max=6.0))
