"""Which values share memory, which are written, and which outlive a run; wrong answers here would be wrong programs."""

import torch
import torch.nn.functional as F
from torch import nn

import torchgraft
from torchgraft.analysis.aliases import Aliases, is_fixed


def facts(function):
    program = torchgraft.symbolic_trace(function)
    memory = Aliases(program.graph)
    memory.program = program  # a graph does not keep its module alive
    return memory, {node.name: node for node in program.graph.nodes}


def test_views_and_new_memory():
    def function(x):
        a = x.exp()
        b = a.view(-1)
        c = b + 1
        return c

    memory, nodes = facts(function)
    assert memory.class_of(nodes["exp"]) == memory.class_of(nodes["view"])
    assert not (memory.class_of(nodes["exp"]) == memory.class_of(nodes["add"]))
    assert memory.is_fresh(nodes["exp"]) and not memory.is_fresh(nodes["view"])
    assert memory.outlives(nodes["add"]) and not memory.outlives(nodes["exp"])
    assert not memory.has_writes


def test_writes_through_views():
    def function(x):
        a = x.exp()
        a.view(-1).add_(1)
        return a.sum() + x.sin()

    memory, nodes = facts(function)
    assert memory.is_written(nodes["exp"]) and not memory.is_written(nodes["sin"])
    assert memory.is_touched_between(nodes["exp"], 0, 99)
    assert not memory.is_touched_between(nodes["exp"], memory.position[nodes["add_"]], 99)


def test_two_inputs_may_be_one_tensor():
    memory, nodes = facts(lambda x, y: (x.add_(1), y.sum())[1])
    assert (memory.class_of(nodes["x"]) == memory.class_of(nodes["y"])) and memory.is_written(nodes["y"])


def test_lists_hold_what_is_put_into_them():
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    value, holder = graph.call_method("exp", (x,)), graph.call_function(list, ((),))
    graph.call_method("append", (holder, value))
    graph.call_method("add_", (value, 1))
    graph.output(holder)
    memory = Aliases(torchgraft.GraphModule(nn.Module(), graph).graph)
    assert (memory.class_of(value) == memory.class_of(holder)) and memory.outlives(value)


def test_tied_state_is_one():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.second.weight = self.first.weight

        def forward(self, x):
            with torch.no_grad():
                self.first.weight.add_(1)
            return self.second(x)

    memory, nodes = facts(Model())
    assert memory.is_state_written(memory.root.get_submodule("second").weight)
    assert memory.is_touched_between(nodes["second"], 0, 99)


def test_regions():
    def function(x):
        with torch.no_grad():
            y = x.exp()
        return y

    memory, nodes = facts(function)
    assert memory.is_in(nodes["exp"], torch.no_grad) and not memory.is_in(nodes["output"], torch.no_grad)


def test_guards_write_nothing():
    def function(x):
        return x + 1 if x.sum() > 0 else x

    program = torchgraft.capture(function, (torch.ones(2),))
    memory = Aliases(program.graph)
    guards = [guard.node for guard in program.guards]
    assert guards and all(is_fixed(node) and not memory.is_pure(node) for node in guards)
    assert not memory.has_writes


def test_what_is_said_to_make_new_memory_does():
    """Layers and functions that schemas say nothing of, each run: the result shares nothing with arguments or state."""
    image, rows = torch.randn(2, 4, 6, 6), torch.randn(3, 4)
    modules = [
        *(nn.Conv1d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv3d(2, 4, 1), nn.ConvTranspose1d(4, 4, 1)),
        *(nn.ConvTranspose2d(4, 4, 1), nn.ConvTranspose3d(2, 4, 1), nn.Linear(4, 4), nn.Bilinear(4, 4, 4)),
        *(nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.BatchNorm3d(2), nn.GroupNorm(1, 4), nn.LayerNorm(4), nn.RMSNorm(4)),
        *(nn.Softmax(-1), nn.LogSoftmax(-1), nn.AvgPool1d(1), nn.AvgPool2d(1), nn.AvgPool3d(1), nn.Embedding(9, 4)),
        *(nn.AdaptiveAvgPool1d(4), nn.AdaptiveAvgPool2d(6), nn.AdaptiveAvgPool3d(6)),
        *(nn.MaxPool1d(1), nn.MaxPool2d(1), nn.MaxPool3d(1)),
    ]
    for module in modules:
        assert is_said_to_be_new(module, len(inputs_of(module, image, rows))), module
        for training in (False, True):
            inputs = inputs_of(module, image, rows)
            check_new(module.train(training)(*inputs), [*inputs, *module.parameters(), *module.buffers()])
    weight = {1: torch.ones(4, 4, 1), 2: torch.ones(4, 4, 1, 1), 3: torch.ones(4, 2, 1, 1, 1)}
    calls = {
        "linear": (rows, torch.eye(4)),
        "bilinear": (rows, rows, torch.ones(2, 4, 4)),
        "batch_norm": (rows, torch.zeros(4), torch.ones(4)),
        "layer_norm": (rows, (4,)),
        "rms_norm": (rows, (4,)),
        "group_norm": (rows, 1),
        "instance_norm": (image,),
        "softmax": (rows, 1),
        "log_softmax": (rows, 1),
        "matmul": (rows, torch.eye(4)),
        "square": (rows,),
        "outer": (rows[0], rows[1]),
        "embedding": (torch.tensor([0]), rows),
        "cosine_similarity": (rows, rows),
        "cross_entropy": (rows, torch.tensor([0, 1, 2])),
        "scaled_dot_product_attention": (image, image, image),
        "max_pool1d": (rows, 1),
        "avg_pool1d": (rows, 1),
        "max_pool2d": (image, 1),
        "max_pool3d": (image, 1),
        "adaptive_avg_pool1d": (rows, 4),
        "adaptive_avg_pool2d": (image, 6),
        "adaptive_avg_pool3d": (image, 6),
        **{f"conv{n}d": (torch.ones(2, w.shape[1], *[3] * n), w) for n, w in weight.items()},
        **{f"conv_transpose{n}d": (torch.ones(2, 4, *[3] * n), w) for n, w in weight.items()},
    }
    for name, args in calls.items():
        for home in (torch, F):
            function = getattr(home, name, None)
            if function is torch.batch_norm:
                check_new(function(rows, None, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5, True), args)
            elif function is torch.instance_norm:
                check_new(function(image, None, None, None, None, True, 0.1, 1e-5, True), args)
            elif function is torch.embedding:
                check_new(function(rows, torch.tensor([0])), args)
            elif function is not None:
                assert is_said_to_be_new(function, *_unknown(args)), name
                check_new(function(*args), args)


def test_what_may_hand_back_its_argument_is_not_said_to_make_new_memory():
    for function, arguments in [
        (torch.Tensor.sum_to_size, ("x", (2, 3))),
        (torch.Tensor.type_as, ("x", "y")),
        (torch.atleast_1d, ("x",)),
        (torch.Tensor.to_dense, ("x",)),
        (torch.Tensor.float, ("x",)),
        (torch.dropout, ("x", 0.5, False)),
    ]:
        assert not is_said_to_be_new(function, *arguments), function


def is_said_to_be_new(target, *arguments) -> bool:
    """Strings are input nodes; a module takes as many as a number says."""
    root = nn.ModuleDict({"m": target}) if isinstance(target, nn.Module) else None
    graph = torchgraft.Graph(root)
    nodes = {name: graph.placeholder(name) for name in "xyz"}
    if isinstance(target, nn.Module):
        call = graph.call_module("m", tuple(nodes.values())[: arguments[0]])
    else:
        call = graph.call_function(target, tuple(nodes.get(v, v) if isinstance(v, str) else v for v in arguments))
    return Aliases(graph).is_fresh(call)


def _unknown(args):
    names = iter("xyz")
    return [next(names) if isinstance(value, torch.Tensor) else value for value in args]


def inputs_of(module, image, rows):
    if isinstance(module, nn.Embedding):
        return (torch.tensor([0, 1]),)
    if isinstance(module, nn.Bilinear):
        return rows, rows
    if "3d" in type(module).__name__:
        return (torch.randn(2, 2, 6, 6, 6),)
    if "2d" in type(module).__name__ or isinstance(module, nn.GroupNorm):
        return (image,)
    return (rows,) if "1d" not in type(module).__name__ else (torch.randn(2, 4, 4),)


def check_new(result, others):
    for other in others:
        if isinstance(other, torch.Tensor):
            assert result.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_a_guard_shares_nothing():
    """Its result is None: a value that is checked is no part of the world outside, which others write."""

    def function(x, keys):
        first, second = x.exp().chunk(2)
        keys.add_(1)
        return first + second

    program = torchgraft.capture(function, (torch.ones(4), torch.ones(4)))
    memory = Aliases(program.graph)
    nodes = {node.name: node for node in program.graph.nodes}
    checks = [node for node in nodes["chunk"]._users if is_fixed(node)]
    assert checks and all(memory.is_fresh(node) for node in checks)
    assert memory.is_written(nodes["keys"]) and not memory.is_written(nodes["exp"])
