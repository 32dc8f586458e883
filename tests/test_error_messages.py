"""The texts of errors, kept in `tests/golden/errors/`, one file for each way of going wrong, so that they are read as texts.

File names and line numbers are replaced. To change a text, look at what has become different, then write them anew:

    python -m tests.test_error_messages
"""

from __future__ import annotations

import difflib
import inspect
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import Graph, GraphModule, Interpreter, Tracer, symbolic_trace
from torchgraft.ir.contexts import enter_context

GOLDEN = Path(__file__).parent / "golden" / "errors"

# Name of the text, and a function that raises the error.
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("memory", torch.ones(3))
        self.count = 0
        self.items: list[Any] = []


class Unknown:
    def __repr__(self) -> str:
        return "<something unknown>"


def model_with(body: Callable[..., Any]) -> nn.Module:
    return type("Model", (Model,), {"forward": body})()


def small_graph() -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (graph.call_method("relu", (x,)), 1)))
    return graph


def node_of(graph: Graph, name: str) -> torchgraft.Node:
    return next(node for node in graph.nodes if node.name == name)


# ---- what cannot be traced ----


@case
def trace_branch():
    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            return y
        return x

    symbolic_trace(model_with(forward))


@case
def trace_branch_on_an_input():
    symbolic_trace(lambda x: -x if x else x)


@case
def trace_len():
    symbolic_trace(lambda x: x * len(x))


@case
def trace_iterate():
    symbolic_trace(lambda x: [row + 1 for row in x])


@case
def trace_range():
    symbolic_trace(lambda x: [x + i for i in range(x.shape[0])])


@case
def trace_int():
    symbolic_trace(lambda x: x * int(x.mean()))


@case
def trace_in():
    symbolic_trace(lambda x: x if 3 in x else -x)


@case
def trace_numpy():
    import numpy

    symbolic_trace(lambda x: numpy.asarray(x))


@case
def trace_index_a_list():
    symbolic_trace(lambda x: [1, 2, 3][x.argmax()] * x)


@case
def trace_read_a_buffer():
    def forward(self, x):
        return x * self.memory.tolist()[0]

    symbolic_trace(model_with(forward))


@case
def trace_branch_on_a_buffer():
    def forward(self, x):
        return x if self.memory[0] > 0 else -x

    symbolic_trace(model_with(forward))


@case
def trace_unknown_module():
    relu = nn.ReLU()
    symbolic_trace(lambda x: relu(x))


@case
def trace_unknown_parameter():
    weight = nn.Parameter(torch.ones(3))
    symbolic_trace(lambda x: x * weight)


@case
def trace_unsupported_argument():
    symbolic_trace(lambda x: x.add(Unknown()))


@case
def trace_dictionary_key():
    symbolic_trace(lambda x: {x: 1})


@case
def trace_concrete_args_by_position():
    symbolic_trace(lambda x, flag: x, concrete_args=(True, False, True))


@case
def trace_root_hooks():
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_forward_hook(lambda *details: None)
    symbolic_trace(model)


@case
def trace_attribute_write():
    def forward(self, x):
        self.count += 1
        return x * self.count

    symbolic_trace(model_with(forward))


@case
def trace_mode_write():
    def forward(self, x):
        self.eval()
        return self.linear(x)

    symbolic_trace(model_with(forward))


@case
def trace_list_append():
    def forward(self, x):
        self.items.append(x)
        return x

    symbolic_trace(model_with(forward))


@case
def trace_not_a_function():
    symbolic_trace(3)


@case
def trace_class():
    symbolic_trace(Model)


@case
def trace_concrete_args_as_inputs():
    symbolic_trace(Model(), torch.ones(2, 4))


@case
def capture_class():
    torchgraft.capture(Model, (torch.ones(2, 4),))


@case
def trace_built_in_function():
    symbolic_trace(torch.relu)


@case
def trace_no_such_method():
    class Other(Tracer):
        traced_func_name = "generate"

    Other().trace(nn.Linear(3, 3))


@case
def trace_wrap_inside_a_function():
    torchgraft.wrap("len")


@case
def trace_wrap_not_a_function():
    torchgraft.wrap(3)


@case
def trace_mutable_operation():
    class Strict(Tracer):
        check_mutable_operations = True

    Strict().trace(lambda x: torch.relu_(x))


# ---- bad edits ----


@case
def edit_erase_used():
    graph = small_graph()
    graph.erase_node(node_of(graph, "relu"))


@case
def edit_node_of_another_graph():
    graph, other = small_graph(), small_graph()
    graph.call_function(torch.relu, (node_of(other, "x"),))


@case
def edit_dead_node_as_argument():
    graph = small_graph()
    dead = graph.call_function(torch.zeros, (1,))
    graph.erase_node(dead)
    graph.call_function(torch.relu, (dead,))


@case
def edit_dead_node():
    graph = small_graph()
    dead = graph.call_function(torch.zeros, (1,))
    graph.erase_node(dead)
    dead.args = (2,)


@case
def edit_insert_at_a_dead_node():
    graph = small_graph()
    dead = graph.call_function(torch.zeros, (1,))
    graph.erase_node(dead)
    graph.inserting_before(dead)


@case
def edit_illegal_name():
    node_of(small_graph(), "relu").name = 3


@case
def edit_duplicate_name():
    node_of(small_graph(), "relu").name = "add"


@case
def edit_bad_opcode():
    small_graph().create_node("call_operator", torch.relu)


@case
def edit_bad_target():
    small_graph().call_function("relu")


@case
def edit_argument_list():
    small_graph().create_node("call_function", torch.relu, [1])


@case
def edit_immutable_arguments():
    graph = small_graph()
    node = graph.call_function(torch.cat, ([node_of(graph, "x")],))
    node.args[0].append(1)


@case
def edit_copy_a_node_alone():
    import copy

    copy.deepcopy(node_of(small_graph(), "relu"))


@case
def edit_find_functions():
    small_graph().find_nodes(op="call_function")


@case
def edit_no_output():
    Graph().output_node()


# ---- what lint, code generation and running find ----


@case
def lint_cycle():
    graph = small_graph()
    node_of(graph, "relu").args = (node_of(graph, "add"),)
    graph.lint()


@case
def lint_several_problems():
    graph = small_graph()
    node_of(graph, "relu").args = (node_of(graph, "relu"),)
    graph.call_module("no.such", (node_of(graph, "x"),))
    model = Model()
    graph.owning_module = model
    graph.lint()


@case
def lint_missing_attribute():
    module = GraphModule(Model(), small_graph())
    node_of(module.graph, "relu").op = "call_module"
    node_of(module.graph, "relu").target = "linear.no_such"
    module.graph.lint()


@case
def lint_unclosed_region():
    graph = small_graph()
    with graph.inserting_before(node_of(graph, "relu")):
        graph.call_function(enter_context, (torch.no_grad,))
    graph.lint()


@case
def code_unclosed_region():
    graph = small_graph()
    with graph.inserting_before(node_of(graph, "relu")):
        graph.call_function(enter_context, (torch.no_grad,))
    graph.python_code("self")


@case
def code_tensor_as_argument():
    graph = small_graph()
    node_of(graph, "add").args = (node_of(graph, "relu"), torch.ones(2, 3))
    graph.python_code("self")


@case
def code_unnamed_function():
    graph = small_graph()
    graph.call_function([].append, ("x",))
    graph.python_code("self")


@case
def module_of_missing_attribute():
    graph = Graph()
    graph.output(graph.get_attr("linear.no_such"))
    GraphModule(Model(), graph)


@case
def module_of_missing_value():
    graph = Graph()
    graph.output(graph.get_attr("weight"))
    GraphModule({}, graph)


@case
def module_of_something_else():
    GraphModule(3, small_graph())


@case
def module_graph_of_another_kind():
    GraphModule(Model(), small_graph()).graph = "graph"


@case
def pickle_local_function():
    def mine(x):
        return x

    graph = small_graph()
    graph.call_function(mine, (node_of(graph, "x"),))
    pickle.dumps(GraphModule(Model(), graph))


@case
def pickle_lambda():
    graph = small_graph()
    graph.call_function(lambda x: x, (node_of(graph, "x"),))
    pickle.dumps(GraphModule(Model(), graph))


@case
def run_mode_changed():
    def forward(self, x):
        if self.training:
            x = x * 2
        return self.linear(x)

    symbolic_trace(model_with(forward)).eval()(torch.ones(1, 3))


@case
def run_specialised_argument():
    def forward(x, flag=None, scale=2):
        return x if flag is None else x * scale

    symbolic_trace(forward, concrete_args={"scale": 3})(torch.ones(1), None, 4)


@case
def run_interpreter_missing_value():
    module = GraphModule(Model(), small_graph())
    Interpreter(module).run_node(node_of(module.graph, "add"))


@case
def run_interpreter_missing_input():
    Interpreter(GraphModule(Model(), small_graph())).run()


@case
def run_interpreter_boxed():
    Interpreter(GraphModule(Model(), small_graph())).boxed_run([1, 2])


@case
def run_missing_attribute():
    module = symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
    delattr(module, "0")
    Interpreter(module).run(torch.ones(1, 3))


@case
def run_failing_code():
    def forward(x, y):
        total = x + 1
        return total @ y

    symbolic_trace(forward)(torch.ones(2, 3), torch.ones(2, 3))


# ---- the texts ----


def text_of(raises: Callable[[], Any]) -> str:
    """The error that a case raises, with its notes and without anything that differs between machines."""
    try:
        raises()
    except Exception as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    else:
        raise AssertionError(f"{raises.__name__} raised nothing")
    text = text.replace(os.path.abspath(__file__), "FILE").replace(__name__, "tests.test_error_messages")
    text = re.sub(r"FILE:\d+", "FILE:LINE", text)
    text = re.sub(r'File "FILE", line \d+', 'File "FILE", line LINE', text)
    text = re.sub(r"<torchgraft (\S+) \d+>", r"<torchgraft \1 N>", text)
    text = text.replace("RuntimeError: mm: mat1", "RuntimeError: mat1")  # torch names the operator since 2.15
    return re.sub(r" at 0x[0-9a-f]+", " at ADDRESS", text) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_text(name):
    found = text_of(CASES[name])
    file = GOLDEN / f"{name}.txt"
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    changes = difflib.unified_diff(expected.splitlines(), found.splitlines(), "golden", "found", lineterm="")
    assert found == expected, "the text has changed:\n" + "\n".join(changes)


def test_every_text_has_its_case():
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(CASES)


# Their place is the call itself, which the traceback shows: there is no line of a traced function to name.
_WITHOUT_PLACE = {
    "trace_concrete_args_by_position", "trace_root_hooks", "trace_not_a_function",
    "trace_class", "trace_concrete_args_as_inputs", "trace_built_in_function", "trace_no_such_method",
    "trace_wrap_inside_a_function", "trace_wrap_not_a_function",
}  # fmt: skip


_PLACED = [name for name in CASES if name.startswith("trace_") and name not in _WITHOUT_PLACE]


@pytest.mark.parametrize("name", _PLACED)
def test_what_cannot_be_traced_is_shown_where_it_stands(name):
    """The user's file, a line inside the traced function, and its text."""
    text = str(_error_of(CASES[name]))
    place = re.search(re.escape(os.path.abspath(__file__)) + r':(\d+) "(.*?)"(?:[;:,. \n]|$)', text)
    assert place, text
    lines, first = inspect.getsourcelines(CASES[name])
    assert first <= int(place[1]) < first + len(lines)
    assert place[2].strip() == Path(__file__).read_text(encoding="utf-8").splitlines()[int(place[1]) - 1].strip()


@pytest.mark.parametrize(
    "name",
    [name for name in CASES if name != "run_failing_code"],
)
def test_the_remedy_is_said(name):
    """After what happened comes what to do, in the imperative."""
    text = text_of(CASES[name])
    words = "use|give|add|assign|remove|fix|keep|make|copy|define|choose|take|capture|close|install|name|pass|wrap|move|run|say"
    assert re.search(rf"(?:[;:!.,\n]|\bor|\bso) +(?i:{words})\b|goes to call_method", text), text


def _error_of(raises: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        raises()
    return caught.value


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, raises in CASES.items():
        (GOLDEN / f"{name}.txt").write_text(text_of(raises), encoding="utf-8")
