"""The samples of torch.fx's official documentation and tutorials, changed in nothing but their import.

Samples shown in the docstrings of Interpreter, Transformer and the rewriter stand with their subjects.
"""

import math

import torch
from torch import nn
from torch.nn import functional


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


def test_decomposition_by_retracing(port) -> None:
    program = port("""
        import torch
        import torch.fx as fx
        import torch.nn.functional as F

        # Note that this decomposition rule can be read as regular Python
        def relu_decomposition(x):
            return (x > 0) * x

        decomposition_rules = {}
        decomposition_rules[F.relu] = relu_decomposition

        def decompose(model: torch.nn.Module,
                      tracer_class : type = fx.Tracer) -> torch.nn.Module:
            graph : fx.Graph = tracer_class().trace(model)
            new_graph = fx.Graph()
            env = {}
            tracer = fx.proxy.GraphAppendingTracer(new_graph)
            for node in graph.nodes:
                if node.op == 'call_function' and node.target in decomposition_rules:
                    # By wrapping the arguments with proxies,
                    # we can dispatch to the appropriate
                    # decomposition rule and implicitly add it
                    # to the Graph by symbolically tracing it.
                    proxy_args = [
                        fx.Proxy(env[x.name], tracer) if isinstance(x, fx.Node) else x for x in node.args]
                    output_proxy = decomposition_rules[node.target](*proxy_args)

                    # Operations on `Proxy` always yield new `Proxy`s, and the
                    # return value of our decomposition rule is no exception.
                    new_node = output_proxy.node
                    env[node.name] = new_node
                else:
                    # Default case: we don't have a decomposition rule for this
                    # node, so just copy the node over into the new graph.
                    new_node = new_graph.node_copy(node, lambda x: env[x.name])
                    env[node.name] = new_node
            return fx.GraphModule(model, new_graph)

        class M(torch.nn.Module):
            def forward(self, x):
                return F.relu(x) + F.relu(x * 2)

        decomposed = decompose(M())
    """)
    assert functional.relu not in [node.target for node in program.decomposed.graph.nodes]
    x = torch.randn(5)
    assert torch.equal(program.decomposed(x), program.M()(x))
    program.decomposed.graph.lint()


def test_inversion_tutorial(port) -> None:
    program = port("""
        import torch
        import torch.fx as fx

        invert_mapping = {}
        def add_inverse(a, b):
            invert_mapping[a] = b
            invert_mapping[b] = a
        inverses = [
            (torch.sin, torch.arcsin),
            (torch.cos, torch.arccos),
            (torch.tan, torch.arctan),
            (torch.exp, torch.log),
        ]
        for a, b in inverses:
            add_inverse(a, b)

        def invert(model: torch.nn.Module) -> torch.nn.Module:
            fx_model = fx.symbolic_trace(model)
            new_graph = fx.Graph()  # As we're building up a new graph
            env = {}
            for node in reversed(fx_model.graph.nodes):
                if node.op == 'call_function':
                    # This creates a node in the new graph with the inverse function,
                    # and passes `env[node.name]` (i.e. the previous output node) as
                    # input.
                    new_node = new_graph.call_function(invert_mapping[node.target], (env[node.name],))
                    env[node.args[0].name] = new_node
                elif node.op == 'output':
                    # We turn the output into an input placeholder
                    new_node = new_graph.placeholder(node.name)
                    env[node.args[0].name] = new_node
                elif node.op == 'placeholder':
                    # We turn the input placeholder into an output
                    new_graph.output(env[node.name])
                else:
                    raise RuntimeError("Not implemented")

            new_graph.lint()
            return fx.GraphModule(fx_model, new_graph)

        def f(x):
            return torch.exp(torch.tan(x))

        res = invert(f)
        f_inv = res
    """)
    x = torch.tensor([0.1, 0.5])
    assert torch.allclose(program.f_inv(program.f(x)), x)
    inverted_twice = program.invert(program.f_inv)
    assert torch.allclose(inverted_twice(x), program.f(x))


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


def test_conv_and_batchnorm_fusion_tutorial(port) -> None:
    program = port("""
        from typing import Type, Dict, Any, Tuple, Iterable
        import copy
        import torch.fx as fx
        import torch
        import torch.nn as nn

        class WrappedBatchNorm(nn.Module):
            def __init__(self):
                super().__init__()
                self.mod = nn.BatchNorm2d(1)
            def forward(self, x):
                return self.mod(x)

        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv1 = nn.Conv2d(1, 1, 1)
                self.bn1 = nn.BatchNorm2d(1)
                self.conv2 = nn.Conv2d(1, 1, 1)
                self.nested = nn.Sequential(
                    nn.BatchNorm2d(1),
                    nn.Conv2d(1, 1, 1),
                )
                self.wrapped = WrappedBatchNorm()

            def forward(self, x):
                x = self.conv1(x)
                x = self.bn1(x)
                x = self.conv2(x)
                x = self.nested(x)
                x = self.wrapped(x)
                return x

        def fuse_conv_bn_eval(conv, bn):
            fused_conv = copy.deepcopy(conv)
            fused_conv.weight, fused_conv.bias = fuse_conv_bn_weights(
                fused_conv.weight, fused_conv.bias, bn.running_mean, bn.running_var, bn.eps, bn.weight, bn.bias)
            return fused_conv

        def fuse_conv_bn_weights(conv_w, conv_b, bn_rm, bn_rv, bn_eps, bn_w, bn_b):
            if conv_b is None:
                conv_b = torch.zeros_like(bn_rm)
            if bn_w is None:
                bn_w = torch.ones_like(bn_rm)
            if bn_b is None:
                bn_b = torch.zeros_like(bn_rm)
            bn_var_rsqrt = torch.rsqrt(bn_rv + bn_eps)
            conv_w = conv_w * (bn_w * bn_var_rsqrt).reshape([-1] + [1] * (len(conv_w.shape) - 1))
            conv_b = (conv_b - bn_rm) * bn_var_rsqrt * bn_w + bn_b
            return torch.nn.Parameter(conv_w), torch.nn.Parameter(conv_b)

        def _parent_name(target : str) -> Tuple[str, str]:
            *parent, name = target.rsplit('.', 1)
            return parent[0] if parent else '', name

        def replace_node_module(node: fx.Node, modules: Dict[str, Any], new_module: torch.nn.Module):
            assert(isinstance(node.target, str))
            parent_name, name = _parent_name(node.target)
            setattr(modules[parent_name], name, new_module)

        def fuse(model: torch.nn.Module) -> torch.nn.Module:
            model = copy.deepcopy(model)
            # The first step of most FX passes is to symbolically trace our model to
            # obtain a `GraphModule`.
            fx_model: fx.GraphModule = fx.symbolic_trace(model)
            modules = dict(fx_model.named_modules())

            # The primary representation for working with FX are the `Graph` and the
            # `Node`. Each `GraphModule` has a `Graph` associated with it.
            for node in fx_model.graph.nodes:
                if node.op != 'call_module':
                    continue
                # For call sites, `Node.target` represents the module/function/method
                # that's being called. Here, we check `Node.target` to see if it's a
                # batch norm module, and then check `Node.args[0].target` to see if the
                # input `Node` is a convolution.
                if type(modules[node.target]) is nn.BatchNorm2d and node.args[0].op == 'call_module' \\
                        and type(modules[node.args[0].target]) is nn.Conv2d:
                    if len(node.args[0].users) > 1:  # Output of conv is used by other nodes
                        continue
                    conv = modules[node.args[0].target]
                    bn = modules[node.target]
                    fused_conv = fuse_conv_bn_eval(conv, bn)
                    replace_node_module(node.args[0], modules, fused_conv)
                    # As we've folded the batch norm into the conv, we need to replace all uses
                    # of the batch norm with the conv.
                    node.replace_all_uses_with(node.args[0])
                    # Now that all uses of the batch norm have been replaced, we can
                    # safely remove the batch norm.
                    fx_model.graph.erase_node(node)
            fx_model.graph.lint()
            # After we've modified our graph, we need to recompile our graph in order
            # to keep the generated code in sync.
            fx_model.recompile()
            return fx_model

        model = M()
        model.eval()
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.uniform_()
                part.running_var.uniform_(0.5, 2.0)
        traced_model = fx.symbolic_trace(model)
        fused_model = fuse(model)
    """)
    x = torch.rand(2, 1, 2, 2)
    torch.testing.assert_close(program.fused_model(x), program.model(x))
    assert [node.target for node in program.fused_model.graph.find_nodes(op="call_module")] == [
        "conv1", "conv2", "nested.1",
    ]  # fmt: skip
    assert len(program.traced_model.graph.find_nodes(op="call_module")) == 6


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
