"""Code generation seen from outside: ``python_code``, ``on_generate_code`` and CodeGen subclasses.

Equality of the text with torch.fx's, program by program, is examined in test_code_equality.
"""

import copy
from types import ModuleType

import pytest
import torch

from tests.compatibility.networks import OneLinear


def relu_module(fx: ModuleType):
    return fx.symbolic_trace(lambda x: torch.relu(x))


def test_python_code_has_source_and_globals(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.relu(x) + local_function(x))
    code = traced.graph.python_code("self")
    assert "def forward(self, x):" in code.src
    assert "torch.relu(x)" in code.src
    assert isinstance(code.globals, dict)
    assert code.globals["torch"] is torch


def local_function(x):
    return x


def test_source_can_be_executed_with_its_globals(fx: ModuleType) -> None:
    tracer = fx.Tracer(autowrap_functions=(local_function,))
    graph = tracer.trace(lambda x: local_function(x) + 1)
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)
    assert namespace["forward"](None, 3) == 4
    assert local_function in code.globals.values()


def test_name_of_the_root_module_can_be_chosen(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(OneLinear())
    assert "owner.linear(x)" in traced.graph.python_code("owner").src


def test_code_generator_inserts_lines(fx: ModuleType) -> None:
    def insert_line(body):
        return ["note = 'inserted'\n", *body]

    traced = relu_module(fx)
    traced.graph.on_generate_code(lambda _: insert_line)
    traced.recompile()
    assert "note = 'inserted'" in traced.code
    assert traced(torch.tensor(-1.0)).item() == 0.0


def test_code_transformers_chain(fx: ModuleType) -> None:
    def insert(text):
        return lambda current: lambda body: [text, *(current(body) if current else body)]

    traced = relu_module(fx)
    traced.graph.on_generate_code(insert("first = 1\n"))
    traced.graph.on_generate_code(insert("second = 2\n"))
    traced.recompile()
    assert traced.code.index("second = 2") < traced.code.index("first = 1")


def test_code_transformer_may_be_replaced(fx: ModuleType) -> None:
    traced = relu_module(fx)
    traced.graph.on_generate_code(lambda _: lambda body: ["first = 1\n", *body])
    traced.graph.on_generate_code(lambda _: lambda body: ["second = 2\n", *body])
    traced.recompile()
    assert "first = 1" not in traced.code
    assert "second = 2" in traced.code


def test_code_transformer_as_a_context_is_removed(fx: ModuleType) -> None:
    traced = relu_module(fx)
    plain = traced.code
    with traced.graph.on_generate_code(lambda _: lambda body: ["inside = 1\n", *body]):
        traced.recompile()
        assert "inside = 1" in traced.code
    traced.recompile()
    assert traced.code == plain


def test_code_transformer_contexts_nest(fx: ModuleType) -> None:
    def insert(text):
        return lambda current: lambda body: [text, *(current(body) if current else body)]

    traced = relu_module(fx)
    with traced.graph.on_generate_code(insert("outer = 1\n")):
        with traced.graph.on_generate_code(insert("inner = 2\n")):
            traced.recompile()
            assert "outer = 1" in traced.code and "inner = 2" in traced.code
        traced.recompile()
        assert "outer = 1" in traced.code and "inner = 2" not in traced.code
    traced.recompile()
    assert "outer = 1" not in traced.code


def test_transformer_sees_the_lines_of_the_body(fx: ModuleType) -> None:
    seen = []

    def look(body):
        seen.extend(body)
        return body

    traced = relu_module(fx)
    traced.graph.on_generate_code(lambda _: look)
    traced.recompile()
    text = "".join(seen)
    assert "relu = torch.relu(x)" in text
    assert "return relu" in text


def list_codegen(fx: ModuleType):
    class ListCodeGen(fx.CodeGen):
        """Takes its inputs as one list, returns its results as one list."""

        def gen_fn_def(self, free_vars, maybe_return_annotation):
            return f"def forward(self, args_list: List[torch.Tensor]){maybe_return_annotation}:\n    " + (
                f"{', '.join(free_vars)}, = args_list" if free_vars else "pass"
            )

        def generate_output(self, output_args):
            return f"return [{output_args!r}]"

        def additional_globals(self):
            return [("List", list)]

        def process_inputs(self, *inputs):
            assert len(inputs) == 1
            return inputs[0]

        def process_outputs(self, outputs):
            return [outputs]

    return ListCodeGen()


def test_custom_codegen_changes_the_calling_convention(fx: ModuleType) -> None:
    def forward(x, y):
        return x + y

    traced = fx.symbolic_trace(forward)
    traced.graph.set_codegen(list_codegen(fx))
    traced.recompile()
    assert traced([1, 2]) == [3]
    assert "def forward(self, args_list: List[torch.Tensor]):" in traced.code
    assert traced.graph.python_code("self").globals["List"] is list


def test_custom_codegen_processes_inputs_and_outputs(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x, y: x + y)
    traced.graph.set_codegen(list_codegen(fx))
    traced.recompile()
    assert traced.graph.process_inputs([1, 2]) == [1, 2]
    assert traced.graph.process_outputs(3) == [3]
    assert fx.Interpreter(traced).run([1, 2]) == [3]
    assert fx.Interpreter(traced).run(1, 2, enable_io_processing=False) == 3


def test_custom_codegen_survives_copies_and_transformers(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x, y: x + y)
    traced.graph.set_codegen(list_codegen(fx))
    traced.recompile()
    assert copy.deepcopy(traced)([1, 2]) == [3]
    assert fx.Transformer(traced).transform()([1, 2]) == [3]


def test_default_codegen_processes_nothing(fx: ModuleType) -> None:
    graph = relu_module(fx).graph
    assert graph.process_inputs(1, 2) == (1, 2)
    assert graph.process_outputs([3]) == [3]


def test_default_codegen_methods(fx: ModuleType) -> None:
    codegen = fx.CodeGen()
    assert codegen.gen_fn_def(["a", "b"], "") == "def forward(self, a, b):"
    assert codegen.gen_fn_def(["a"], " -> int") == "def forward(self, a) -> int:"
    assert codegen.generate_output((1, "two")) == "return (1, 'two')"
    assert list(codegen.additional_globals()) == []
    assert codegen.process_inputs(1, 2) == (1, 2)
    assert codegen.process_outputs(3) == 3


def test_values_are_freed_after_their_last_use(fx: ModuleType) -> None:
    def forward(x):
        y = x + 1
        z = y * 2
        return z

    code = fx.symbolic_trace(forward).code
    assert "add = x + 1;  x = None\n" in code
    assert "mul = add * 2;  add = None\n" in code


def test_unused_value_is_freed_at_once(fx: ModuleType) -> None:
    def forward(x):
        torch.relu(x)
        return x

    assert "relu = torch.relu(x);  relu = None\n" in fx.symbolic_trace(forward).code


def test_functions_of_the_same_name_do_not_collide(fx: ModuleType) -> None:
    def make(offset):
        def act(x):
            return x + offset

        return act

    one, two = make(1), make(10)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(one, (x,)), graph.call_function(two, (x,))))
    assert fx.GraphModule({}, graph)(0) == (1, 10)


def test_node_named_like_a_global_does_not_hide_it(fx: ModuleType) -> None:
    graph = fx.Graph()
    torch_input = graph.placeholder("x")
    math_like = graph.create_node("call_function", torch.neg, (torch_input,), name="torch")
    graph.output(graph.call_function(torch.relu, (math_like,)))
    module = fx.GraphModule({}, graph)
    assert module(torch.tensor(-2.0)).item() == 2.0


def test_recompile_returns_the_code_it_installed(fx: ModuleType) -> None:
    traced = relu_module(fx)
    code = traced.recompile()
    assert code.src == traced.code


@pytest.mark.parametrize("annotation", [int, list[int], tuple[torch.Tensor, ...], "torch.Tensor", None | int], ids=str)
def test_annotations_of_many_kinds_run(fx: ModuleType, annotation: object) -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x", type_expr=annotation if annotation != "torch.Tensor" else torch.Tensor))
    assert fx.GraphModule({}, graph)(3) == 3
