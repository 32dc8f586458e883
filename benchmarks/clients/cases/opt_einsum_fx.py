"""opt_einsum_fx: einsums of a traced function are fused, reordered and made fit for TorchScript."""

import torch
import torch.fx
from opt_einsum_fx import (
    EfficientShapeProp,
    fuse_einsums,
    fuse_scalars,
    jitable,
    optimize_einsums,
    optimize_einsums_full,
)

from benchmarks.clients.case import each, nodes, same


def chain(x, y, z):
    return torch.einsum("ij,jk,kl->il", x, y, z)


def nested(x, y, z):
    return torch.einsum("ij,jk->ik", torch.einsum("ij,jk->ik", x, y), z)


def scaled(x, y, z):
    return 2 * torch.einsum("ij,jk->ik", 3 * x, y / 4).mul(5) @ z


def named(x, y, z):
    a = torch.einsum("ij,jk->ik", x, y)
    b = torch.einsum("ij,ij,jk->ik", a, a, z)
    return a + 2 * b


def tensordot(x, y, z):
    return torch.tensordot(torch.tensordot(x, y, dims=([1], [0])), z, dims=([1], [0]))


def unused(x, y, z):
    torch.einsum("ij,jk->ik", x, y)
    return torch.einsum("ij->ji", z)


def broadcast(x, y, z):
    return torch.einsum("ij,jk->i", x, y) + z.sum()


def in_place(x, y, z):
    return torch.einsum("ij,jk->ik", x, y) * z.clone().copy_(x)


PROGRAMS = {body.__name__: body for body in (chain, nested, scaled, named, tensordot, unused, broadcast, in_place)}


def matrices():
    return tuple(torch.randn(4, 4) for _ in range(3))


@each(**PROGRAMS)
def case_trace(program):
    return nodes(torch.fx.symbolic_trace(program).graph)


@each(**PROGRAMS)
def case_optimize_full(program):
    x = matrices()
    optimized = optimize_einsums_full(program, x)
    same(optimized(*x), program(*x))
    return nodes(optimized.graph)


@each(**PROGRAMS)
def case_fuse(program):
    x = matrices()
    traced = torch.fx.symbolic_trace(program)
    EfficientShapeProp(traced).propagate(*x)
    fused = torch.fx.GraphModule({}, fuse_einsums(traced.graph))
    same(fused(*x), program(*x))
    return nodes(fused.graph)


@each(**PROGRAMS)
def case_fuse_scalars(program):
    x = matrices()
    graph = fuse_scalars(torch.fx.symbolic_trace(program).graph)
    same(torch.fx.GraphModule({}, graph)(*x), program(*x))
    return nodes(graph)


@each(**PROGRAMS)
def case_optimize(program):
    x = matrices()
    traced = torch.fx.symbolic_trace(program)
    EfficientShapeProp(traced).propagate(*x)
    shapes = [list(node.meta["tensor_meta"].shape) for node in traced.graph.nodes if "tensor_meta" in node.meta]
    traced.graph = optimize_einsums(traced.graph, {"optimize": "greedy"})
    traced.recompile()
    same(traced(*x), program(*x))
    return [shapes, nodes(traced.graph)]


@each(**PROGRAMS)
def case_torchscript(program):
    x = matrices()
    optimized = jitable(optimize_einsums_full(program, x))
    script = torch.jit.script(optimized)
    same(script(*x), program(*x))
    return optimized.code


@each("module", "buffer")
def case_modules(kind):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            weight = torch.randn(4, 4)
            if kind == "module":
                self.weight = torch.nn.Parameter(weight)
            else:
                self.register_buffer("weight", weight)

        def forward(self, x, y):
            return torch.einsum("ij,jk,kl->il", x, self.weight, y)

    model, (x, y, _) = Model(), matrices()
    optimized = optimize_einsums_full(model, (x, y))
    same(optimized(x, y), model(x, y))
    return [nodes(optimized.graph), sorted(optimized.state_dict())]


def case_own_tracer():
    class Own(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return True

    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    optimized = optimize_einsums_full(model, (matrices()[0],), tracer_class=Own)
    return nodes(optimized.graph)
