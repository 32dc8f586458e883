"""Where nodes come from: the user's source line and the chain of modules, made into text only when asked for.
That origins survive copies is in test_copying.py.
"""

import sys

import torch
from torch import nn

import torchgraft as fx
from torchgraft.ir import origin


def line_number() -> int:
    return sys._getframe(1).f_lineno


class Inner(nn.Module):
    def forward(self, x):
        return torch.relu(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(self.inner(x)).neg()


def test_current_line_is_the_callers() -> None:
    line, number = origin.current_source_line(), line_number()
    assert (line.file, line.line) == (__file__, number)
    assert line.function == "test_current_line_is_the_callers"
    assert "origin.current_source_line()" in line.text


def failing(run) -> Exception:
    try:
        run()
    except Exception as error:
        return error
    raise AssertionError


def test_line_of_an_error_is_the_innermost_of_the_users() -> None:
    error = failing(lambda: fx.Interpreter(fx.symbolic_trace(Outer())).run(5))
    assert (
        origin.line_of_error(error).text == "error = failing(lambda: fx.Interpreter(fx.symbolic_trace(Outer())).run(5))"
    )
    inside = failing(lambda: Outer()(5))
    assert origin.line_of_error(inside).text == "return torch.relu(x)"


def test_line_of_an_error_passes_over_code_without_text() -> None:
    error = failing(lambda: exec("undefined"))
    assert origin.line_of_error(error).text == 'error = failing(lambda: exec("undefined"))'
    assert origin.line_of_error(ValueError("never raised")) is None


def test_source_line_as_text_names_file_line_and_text() -> None:
    assert str(origin.SourceLine("model.py", 41, "forward", "return x")) == 'model.py:41 "return x"'


def test_without_user_code_there_is_no_line() -> None:
    assert origin.source_line(None, 0) is None
    assert origin.stack_trace_text((None, 0, None)) is None


def test_code_of_torch_and_of_torchgraft_is_not_the_users() -> None:
    assert origin.is_user_code(line_number.__code__)
    assert not origin.is_user_code(nn.Linear.forward.__code__)
    assert not origin.is_user_code(fx.Graph.output_node.__code__)


def test_models_of_the_zoo_count_as_the_users() -> None:
    from torchgraft.zoo.mlp import MLP

    assert origin.is_user_code(MLP.forward.__code__)


def test_lines_inside_torch_are_skipped() -> None:
    def forward(x):
        return nn.functional.gelu(x)

    node = next(node for node in fx.symbolic_trace(forward).graph.nodes if node.op == "call_function")
    assert f'"{__file__}"' in node.stack_trace
    assert "return nn.functional.gelu(x)" in node.stack_trace


def test_stack_trace_looks_like_an_entry_of_a_traceback() -> None:
    def forward(x):
        return torch.relu(x)

    number = forward.__code__.co_firstlineno + 1
    node = next(node for node in fx.symbolic_trace(forward).graph.nodes if node.op == "call_function")
    assert node.stack_trace == f'  File "{__file__}", line {number}, in forward\n    return torch.relu(x)\n'


def test_a_statement_over_many_lines_names_the_line_of_the_call() -> None:
    def forward(x):
        return torch.add(
            torch.relu(x),
            torch.neg(x),
        )

    first = forward.__code__.co_firstlineno
    graph = fx.symbolic_trace(forward).graph
    lines = {
        node.name: int(node.stack_trace.split("line ")[1].split(",")[0]) - first
        for node in graph.nodes
        if node.stack_trace
    }
    assert lines["relu"] == 2
    assert lines["neg"] == 3


def test_module_stack_is_outermost_first_and_numbers_repeated_calls() -> None:
    graph = fx.symbolic_trace(Outer()).graph
    stacks = {node.name: node.meta.get("nn_module_stack") for node in graph.nodes}
    assert stacks["relu"] == {"inner": ("inner", Inner)}
    assert stacks["relu_1"] == {"inner@1": ("inner", Inner)}
    assert not stacks["neg"]


def test_chain_of_scopes() -> None:
    outer = (None, "a", "a", Outer)
    inner = (outer, "a.b", "a.b", Inner)
    assert list(origin.module_stack(inner).items()) == [("a", ("a", Outer)), ("a.b", ("a.b", Inner))]
    assert origin.module_stack(None) == {}


def test_metadata_of_no_origin_is_empty() -> None:
    assert origin.metadata(None) == {}


def test_texts_are_made_only_when_asked_for() -> None:
    node = next(node for node in fx.symbolic_trace(Inner()).graph.nodes if node.op == "call_function")
    assert node._meta is None
    assert node.meta["stack_trace"]
    assert node._meta is node.meta


def test_placeholders_have_no_line() -> None:
    graph = fx.symbolic_trace(Inner()).graph
    assert next(iter(graph.nodes)).stack_trace is None


EXPORTED = """File "/site-packages/launcher.py", line 5, in main
    model(x)
File "{user}", line 12, in forward
    return self.fc(x)
  File "{torch}/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
"""


def test_the_line_of_a_long_trace_is_the_innermost_of_the_user() -> None:
    trace = EXPORTED.format(user=__file__, torch=torch.__path__[0])
    assert origin.user_source_line(trace) == (__file__, 12, "forward", "return self.fc(x)")
    inner = origin.user_source_line(trace[trace.index("  File") :])
    assert inner is not None and inner.line == 134  # nothing else is known


def test_texts_that_are_no_trace() -> None:
    assert [origin.user_source_line(text) for text in (None, "", "nonsense", 'File "x"')] == [None] * 4
    assert origin.user_source_line('File "m.py", line 3') == ("m.py", 3, "", "")
    two = origin.user_source_line('File "m.py", line 3, in a\nFile "m.py", line 4, in b')
    assert two == ("m.py", 4, "b", "")
