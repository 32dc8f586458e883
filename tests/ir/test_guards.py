"""Guards: what each of them lets through and says, that tracers record them, and that whatever carries a program carries them.
Which reads become guards is in tests/capturing; what inputs have to look like is in test_input_kinds.py.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

import torchgraft
from torchgraft import GraftError, GuardError, Interpreter, Transformer, capture, symbolic_trace
from torchgraft.ir import guards
from torchgraft.ir.guards import (
    are_different,
    check_distinct,
    check_given,
    check_inputs,
    check_kind,
    check_length,
    check_result,
    check_training,
    check_value,
    find_guards,
    guards_of,
    is_guard,
)

LINE = 'model.py:3 "if self.training:"'
ALL = [getattr(guards, name) for name in dir(guards) if name.startswith("check_")]
# Arguments that pass, others that do not, and the message for these.
CASES: dict[Callable[..., None], tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    check_training: (
        (True, True, LINE),
        (True, False, LINE),
        "the program was captured in evaluation mode and the module is now in training mode, but the model branched on "
        f"self.training\n  at {LINE}\n"
        "  capture the model again in training mode, or switch this module back with .eval()",
    ),
    check_given: (
        (1, "mask", LINE),
        (None, "mask", LINE),
        f"the program was captured with a value for the argument 'mask', and now it is None\n  at {LINE}\n"
        '  capture the model again with concrete_args={"mask": None}, or give a value',
    ),
    check_value: (
        (float("nan"), float("nan"), "x.item()", LINE),
        (3, 2, "x.size(0)", LINE),
        f"the program was captured for x.size(0) = 2, and now it is 3\n  at {LINE}\n"
        "  capture the model again with inputs like these, or rewrite that line with tensor operations",
    ),
    check_inputs: (
        ({"x": torch.ones(2), "flag": True}, {"x": "tensor", "flag": True}, "the inputs of Net"),
        ({"x": 5}, {"x": "tensor"}, "the inputs of Net"),
        "expected a tensor for 'x', got 5\n  in the inputs of Net\n  capture the model again with inputs like these",
    ),
    check_length: (
        ([1, 2], 2, "the number of results of split()", LINE),
        ([1], 2, "the number of results of split()", LINE),
        f"the program was captured for the number of results of split() = 2, and now it is 1\n  at {LINE}\n"
        "  capture the model again with inputs like these",
    ),
    check_kind: (
        (torch.nn.Parameter(torch.ones(2)), "torch.Tensor", "x", LINE),
        (2.0, "torch.Tensor", "x", LINE),
        f"expected a Tensor for 'x', got 2.0\n  at {LINE}\n"
        "  fix the value with concrete_args, or name its type in the signature",
    ),
    check_result: (
        ((1, 2), "tuple", 2, "head", LINE),
        (torch.ones(2), "tuple", 2, "head", LINE),
        f"expected a tuple of 2 as the result of 'head', got a tensor\n  at {LINE}\n"
        "  capture the model again with inputs, and in a mode, like these",
    ),
    check_distinct: (
        (("a", "b", "c"), 2, LINE),
        (("a", "b", "a"), 1, LINE),
        "the program was captured for objects that are all different, and now one that the model writes into is among the "
        f"inputs twice\n  at {LINE}\n  capture the model again with inputs like these, or give copies",
    ),
}


def test_every_guard_has_a_case() -> None:
    assert set(ALL) == set(CASES)


@pytest.mark.parametrize("check", CASES, ids=lambda check: check.__name__)
class TestEach:
    def test_what_it_was_captured_for_passes(self, check: Any) -> None:
        assert check(*CASES[check][0]) is None

    def test_anything_else_raises_in_three_lines(self, check: Any) -> None:
        with pytest.raises(GuardError) as caught:
            check(*CASES[check][1])
        assert str(caught.value) == CASES[check][2]

    def test_it_says_what_it_asks_for(self, check: Any) -> None:
        graph = torchgraft.Graph()
        node = graph.call_function(check, CASES[check][1])
        assert is_guard(check)
        for guard in guards_of(node):
            assert guard.condition and guard.where == CASES[check][1][-1] and guard.node is node
        assert guards_of(node) or check is check_inputs  # which lists fixed values only
        assert find_guards(graph) == guards_of(node)

    @pytest.mark.parametrize("library", [torch.fx, torchgraft], ids=["torch.fx", "torchgraft"])
    def test_tracers_record_it(self, check: Any, library: Any) -> None:
        found, *details = CASES[check][0]

        def function(x: Any) -> Any:
            if isinstance(found, dict):
                check({"x": x, "flag": True}, *details)
            elif isinstance(found, tuple):
                check((x, *found[1:]), *details)
            else:
                check(x, *details)
            return x

        graph = library.symbolic_trace(function).graph
        recorded = [node for node in graph.nodes if node.target is check]
        assert len(recorded) == 1 and list(recorded[0].args[1:]) == details
        graph.eliminate_dead_code()
        assert recorded == [node for node in graph.nodes if node.target is check]


def test_the_error_has_the_common_root_and_is_a_runtime_error() -> None:
    assert issubclass(GuardError, GraftError) and issubclass(GuardError, RuntimeError)


def test_guards_are_told_by_their_mark() -> None:
    assert len(ALL) > 5 and all(map(is_guard, ALL))
    assert not is_guard(are_different)  # what it answers is checked; it is no check itself
    assert not is_guard("check_value") and not is_guard(guards.Guard)


# ---- whatever carries a program carries its guards, because they are nodes ----


class Branching(torch.nn.Module):
    """Branches on a size and on an optional input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, flag: bool = False) -> torch.Tensor:
        y = self.linear(x)
        return y.sum(0) if x.shape[0] > 2 else y


def _copied_graph(program: Any) -> Any:
    graph = torchgraft.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    return torchgraft.GraphModule(program, graph)


def _copied_nodes(program: Any) -> Any:
    graph, made = torchgraft.Graph(), {}
    for node in program.graph.nodes:
        made[node] = graph.node_copy(node, lambda source: made[source])
    return torchgraft.GraphModule(program, graph)


CARRIERS: dict[str, Callable[[Any], Any]] = {
    "graph_copy": _copied_graph,
    "node_copy": _copied_nodes,
    "deepcopy": copy.deepcopy,
    "pickle": lambda program: pickle.loads(pickle.dumps(program)),
    "Interpreter": lambda program: Interpreter(program).run,
    "Transformer": lambda program: Transformer(program).transform(),
    "split": lambda program: torchgraft.split(program, by=torchgraft.splitting.Size(2)).module,
    "to_fx": torchgraft.to_fx,
    "record": lambda program: lambda *args: torchgraft.record(program, args),
    "symbolic_trace": symbolic_trace,
    "torch.fx.symbolic_trace": torch.fx.symbolic_trace,
    "capture": lambda program: capture(program, (torch.ones(3, 3),)),
}


@pytest.mark.parametrize("carry", CARRIERS.values(), ids=CARRIERS)
def test_guards_go_where_the_program_goes(carry: Callable[[Any], Any]) -> None:
    model = Branching()
    carried = carry(capture(model, (torch.ones(3, 3),)))
    carried(torch.ones(4, 3), False)
    wrong = {
        "x.size(0) > 2": (torch.ones(2, 3), False),
        "expected False for 'flag', got True": (torch.ones(3, 3), True),
    }
    for words, args in wrong.items():
        with pytest.raises((GuardError, RuntimeError)) as caught:
            carried(*args)
        assert words in str(caught.value) or "size > 2" in str(caught.value)


def test_a_program_inside_another_model_keeps_its_guards() -> None:
    inner = capture(Branching(), (torch.ones(3, 3),))
    outer = capture(torch.nn.Sequential(torch.nn.ReLU(), inner), (torch.ones(3, 3),))
    assert [guard.expected for guard in outer.guards if "> 2" in guard.condition] == [True]
    assert [node.args[-1] for node in outer.graph.nodes if node.target is check_inputs] == [
        "the inputs of Sequential",
        "the inputs of Branching",
    ]
    with pytest.raises(GuardError, match="> 2"):
        outer(torch.ones(2, 3))


def test_guards_of_constants_inside_another_model_are_left_out() -> None:
    inner = capture(lambda n: torch.ones(3) * n if n > 2 else torch.ones(3), (torch.tensor(3.0).item(),))
    outer = capture(lambda x: x + inner(3.0), (torch.ones(3),))
    assert [node for node in outer.graph.nodes if node.target is check_value] == []
    assert torch.equal(outer(torch.ones(3)), torch.full((3,), 4.0))


def test_a_guard_on_a_value_compiles_to_code_in_which_quotes_and_lines_end() -> None:
    """The default backend of torch.compile writes the text of an assertion into C++ as it is."""
    program = capture(lambda x: x * 2 if x.max() > 0 else x, (torch.ones(3),))
    texts = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        for node in graph_module.graph.nodes:
            texts.extend([value for value in node.args if isinstance(value, str)])
        return graph_module

    torch.compile(program, backend=backend, fullgraph=True)(torch.ones(3))
    (text,) = [text for text in texts if "the program was captured for" in text]
    assert "x.max() > 0" in text and not set(text) & set('"\n\\')
