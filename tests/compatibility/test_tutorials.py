"""torch.fx's tutorials, changed in nothing but their import: decomposition, inversion, convolution with batch norm.

Shorter samples of the documentation are in test_documentation_samples.
"""

import torch
from torch.nn import functional


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
