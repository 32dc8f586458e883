"""Where a tracer is: what is not asked for costs nothing, and what is asked for in the middle of a trace is right from then on.
How subclasses written for torch.fx use it is examined in tests/compatibility/test_clients.py.
"""

from torch import nn

import torchgraft as fx


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(x) + 1


class Asking(fx.Tracer):
    """Looks at the scope for the first time at the second call of a module, in the middle of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[str]]] = []

    def create_node(self, kind, target, args, kwargs, name=None, type_expr=None):
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if node.name != "x" and len(self.graph.nodes) > 2:
            self.seen.append((self.scope.module_path, list(self.module_stack)))
        return node


def test_scopes_that_are_first_asked_for_in_the_middle() -> None:
    tracer = Asking()
    tracer.trace(nn.Sequential(Block(), Block()))
    assert tracer.seen == [("0", ["0"]), ("1.relu", ["1", "1.relu"]), ("1", ["1"]), ("", [])]
    assert (tracer.scope.module_path, tracer.scope.module_type, len(tracer.module_stack)) == ("", None, 0)


def test_nothing_is_kept_that_nobody_asks_for() -> None:
    tracer = fx.Tracer()
    tracer.trace(Block())
    assert tracer._scope is tracer._module_stack is tracer._node_scopes is None
    assert tracer.node_name_to_scope["relu"] == ("relu", nn.ReLU)


def test_a_tracer_that_was_asked_traces_the_same_program() -> None:
    plain, asked = fx.Tracer(), fx.Tracer()
    _ = asked.scope, asked.module_stack, asked.node_name_to_scope
    model = nn.Sequential(Block(), Block())
    graphs = [tracer.trace(model) for tracer in (plain, asked)]
    assert str(graphs[0]) == str(graphs[1])
    stacks = [[dict(node.meta.get("nn_module_stack", {})) for node in graph.nodes] for graph in graphs]
    assert stacks[0] == stacks[1]
    assert plain.node_name_to_scope == asked.node_name_to_scope
