"""Programs as Python functions: operators, with blocks, freeing, signatures, body transformers, calling conventions.
How single values are written is in test_values.py; whole texts are in test_golden_code.py.
"""

import operator

import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.codegen.source import INPLACE_TEXT, OPERATOR_TEXT, last_uses
from torchgraft.ir.contexts import enter_context, exit_context


def build(function):
    """A program of two inputs whose one call `function(graph, x, y)` makes."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(function(graph, x, y))
    return fx.GraphModule(nn.Module(), graph)


def body(module: fx.GraphModule) -> list[str]:
    lines = [line.strip() for line in module.code.splitlines() if line.strip()]
    return lines[1 + lines.index(next(line for line in lines if line.startswith("def "))) :]


class TestOperators:
    BINARY = sorted(name for name, text in OPERATOR_TEXT.items() if text.count("{}") == 2 and hasattr(operator, name))
    UNARY = sorted(name for name, text in OPERATOR_TEXT.items() if text.count("{}") == 1)

    @pytest.mark.parametrize("name", BINARY)
    def test_a_binary_operator_is_written_as_one_and_means_the_same(self, name: str) -> None:
        function = getattr(operator, name)
        left, right = (
            ([5, 6, 7], 2) if name == "getitem" else (torch.tensor([[7, 5], [2, 1]]), torch.tensor([[2, 1], [3, 1]]))
        )
        module = build(lambda graph, x, y: graph.call_function(function, (x, y)))
        assert "operator" not in module.code
        assert torch.equal(torch.as_tensor(module(left, right)), torch.as_tensor(function(left, right)))

    @pytest.mark.parametrize("name", UNARY)
    def test_a_unary_operator(self, name: str) -> None:
        function = getattr(operator, name)
        module = build(lambda graph, x, y: graph.call_function(function, (x,)))
        assert module(5, None) == function(5)

    @pytest.mark.parametrize("name", sorted(set(INPLACE_TEXT) - {"setitem"}))
    def test_an_in_place_operator_changes_its_operand_as_the_function_does(self, name: str) -> None:
        function = getattr(operator, name)
        module = build(lambda graph, x, y: graph.call_function(function, (x, y)))
        values = torch.tensor([[7, 5], [2, 1]]), torch.tensor([[2, 1], [3, 1]])
        if name == "itruediv":
            values = values[0].double(), values[1].double()
        mine, eager = values[0].clone(), values[0].clone()
        assert torch.equal(module(mine, values[1]), function(eager, values[1]))
        assert torch.equal(mine, eager)

    def test_an_in_place_operator_on_a_number_leaves_the_old_one(self) -> None:
        module = build(lambda graph, x, y: (graph.call_function(operator.iadd, (x, y)), x))
        assert module(1, 2) == (3, 1)

    def test_setitem_is_a_statement_and_its_value_the_container(self) -> None:
        module = build(lambda graph, x, y: (graph.call_function(operator.setitem, (x, 0, y)), x)[1])
        assert "x[0] = y" in module.code
        assert module([1, 2], 3) == [3, 2]

    @pytest.mark.parametrize("base", [-2, -2.5])
    def test_a_negative_number_to_a_power_keeps_its_meaning(self, base) -> None:
        module = build(lambda graph, x, y: graph.call_function(operator.pow, (base, x)))
        assert module(2, None) == base**2

    @pytest.mark.parametrize("value", [3, 2.5, 2j, True])
    def test_an_attribute_of_a_number(self, value) -> None:
        module = build(lambda graph, x, y: graph.call_function(getattr, (value, "real")))
        assert module(None, None) == value.real

    @pytest.mark.parametrize("name", ["class", "not an identifier", "a.b"])
    def test_attributes_with_odd_names(self, name: str) -> None:
        class Thing:
            pass

        thing = Thing()
        setattr(thing, name, 3)
        module = build(lambda graph, x, y: graph.call_function(getattr, (x, name)))
        assert module(thing, None) == 3

    def test_getattr_with_a_default(self) -> None:
        module = build(lambda graph, x, y: graph.call_function(getattr, (x, "gone", 7)))
        assert module(object(), None) == 7

    def test_operators_with_the_wrong_number_of_arguments_are_plain_calls(self) -> None:
        module = build(lambda graph, x, y: graph.call_function(operator.add, (x,)))
        with pytest.raises(TypeError):
            module(1, 2)

    def test_keyword_arguments_that_are_keywords_of_python(self) -> None:
        module = build(lambda graph, x, y: graph.call_method("random_", (x,), {"from": 3, "to": 4}))
        assert module(torch.zeros(1), None) == 3


class TestFreeing:
    def test_each_value_is_freed_after_its_last_use(self) -> None:
        module = build(lambda graph, x, y: graph.call_function(torch.add, (graph.call_function(torch.relu, (x,)), x)))
        assert body(module) == ["relu = torch.relu(x)", "add = torch.add(relu, x);  relu = x = None", "return add"]

    def test_an_unused_value_is_freed_at_once(self) -> None:
        module = build(lambda graph, x, y: (graph.call_function(torch.relu, (x,)), x)[1])
        assert body(module) == ["relu = torch.relu(x);  relu = None", "return x"]

    def test_last_uses(self) -> None:
        graph = build(lambda graph, x, y: graph.call_function(torch.add, (x, x))).graph
        x, y, add, output = graph.nodes
        assert last_uses(graph) == {add: [x], output: [add]}

    def test_memory_is_given_back_while_the_program_runs(self) -> None:
        import weakref

        alive = []

        def look(value):
            alive.append(reference() is not None)
            return value

        def remember(value):
            nonlocal reference
            made = value + 1
            reference = weakref.ref(made)
            return made

        reference = None
        graph = fx.Graph()
        made = graph.call_function(remember, (graph.placeholder("x"),))
        used = graph.call_function(torch.neg, (made,))
        graph.output(graph.call_function(look, (used,)))
        fx.GraphModule(nn.Module(), graph)(torch.ones(1))
        assert alive == [False]


class TestNames:
    def test_attributes_that_are_no_identifiers(self) -> None:
        model = nn.Sequential(nn.ReLU())
        model.add_module("class", nn.ReLU())
        module = fx.symbolic_trace(model)
        assert 'getattr(self, "0")' in module.code
        assert 'getattr(self, "class")' in module.code
        assert module(torch.tensor(-1.0)) == 0

    def test_a_node_with_the_name_of_a_global_does_not_hide_it(self) -> None:
        def helper(x):
            return x + 1

        graph = fx.Graph()
        x = graph.placeholder(f"{__name__.replace('.', '_')}_helper")
        graph.output(graph.call_function(helper, (x,)))
        assert fx.GraphModule(nn.Module(), graph)(1) == 2

    @pytest.mark.parametrize("name", ["input", "len", "type"])
    def test_inputs_with_names_of_builtins(self, name: str) -> None:
        scope: dict = {}
        exec(f"def function({name}): return {name} + 1", scope)
        module = fx.symbolic_trace(scope["function"])
        assert module(1) == module(**{name: 1}) == 2

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("def function(x, device): return x.to(torch.device('cpu'))", "cpu"),
            ("def function(x, slice): return x[1:]", 1),
            ("def function(x, torch): return relu(x)", 1),
            ("def function(x, inf): return x + float('inf')", 1),
        ],
        ids=["device", "slice", "torch", "inf"],
    )
    def test_inputs_with_names_that_code_relies_on(self, text: str, value) -> None:
        scope: dict = {"torch": torch, "relu": torch.relu}
        exec(text, scope)
        function = scope["function"]
        assert torch.equal(fx.symbolic_trace(function)(torch.ones(2), value), function(torch.ones(2), value))

    def test_a_function_with_a_parameter_called_self(self) -> None:
        def function(self, x):
            return self + x

        assert fx.symbolic_trace(function)(1, 2) == 3


class TestRegions:
    def test_nested_regions_are_nested_blocks(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        outer = graph.call_function(enter_context, (torch.no_grad,))
        inner = graph.call_function(enter_context, (torch.autocast, "cpu"), {"enabled": False})
        y = graph.call_function(torch.relu, (x,))
        graph.call_function(exit_context, (inner,))
        graph.call_function(exit_context, (outer,))
        graph.output(y)
        module = fx.GraphModule(nn.Module(), graph)
        assert [line for line in module.code.splitlines() if line.strip()][1:] == [
            "    with torch.no_grad():",
            "        with torch.autocast('cpu', enabled = False):",
            "            relu = torch.relu(x);  x = None",
            "    return relu",
        ]
        assert not module(torch.ones(1, requires_grad=True)).requires_grad


class TestBodyTransformers:
    def test_they_see_lines_and_may_add_some(self) -> None:
        module = build(lambda graph, x, y: graph.call_function(operator.add, (x, y)))
        module.graph.on_generate_code(lambda _: lambda lines: ["x = x * 10\n", *lines])
        assert module(1, 2) == 12

    def test_lines_without_an_end_are_given_one(self) -> None:
        module = build(lambda graph, x, y: x)
        module.graph.on_generate_code(lambda _: lambda lines: ["x = x + 1", *lines])
        assert module(1, 2) == 2

    def test_removing_everything_leaves_a_function_that_does_nothing(self) -> None:
        module = build(lambda graph, x, y: x)
        module.graph.on_generate_code(lambda _: lambda lines: [])
        assert module(1, 2) is None

    def test_the_current_one_is_handed_over(self) -> None:
        module = build(lambda graph, x, y: x)
        module.graph.on_generate_code(lambda current: lambda lines: ["x = x + 1\n", *lines])
        module.graph.on_generate_code(lambda current: lambda lines: ["x = x * 10\n", *current(lines)])
        assert module(1, 2) == 11

    def test_errors_still_name_the_node_of_lines_left_alone(self) -> None:
        module = build(lambda graph, x, y: graph.call_function(operator.add, (x, y)))
        module.graph.on_generate_code(lambda _: lambda lines: ["pass\n", *lines])
        with pytest.raises(TypeError) as caught:
            module(1, "s")
        assert "node 'add'" in caught.value.__notes__[0]


class TestCodeGen:
    def test_python_code_has_the_source_its_globals_and_a_map_of_lines(self) -> None:
        code = build(lambda graph, x, y: graph.call_function(len, (x,))).graph.python_code("self")
        scope = dict(code.globals)
        exec(code.src, scope)
        assert scope["forward"](None, [1, 2], None) == 2
        assert set(code._lineno_map.values()) == {2, 3}

    def test_another_name_for_the_module(self) -> None:
        code = fx.symbolic_trace(nn.Sequential(nn.ReLU())).graph.python_code("root")
        assert 'getattr(root, "0")' in code.src

    def test_a_graph_without_anything_is_a_function_without_anything(self) -> None:
        assert fx.GraphModule(nn.Module(), fx.Graph())() is None

    def test_overrides_with_older_signatures_are_called_with_what_they_take(self) -> None:
        class Old(fx.CodeGen):
            def generate_output(self, output_args):
                return f"return [{output_args}]"

        module = build(lambda graph, x, y: x)
        module.graph.set_codegen(Old())
        assert module(1, 2) == [1]

    def test_additional_globals(self) -> None:
        class Extra(fx.CodeGen):
            def additional_globals(self):
                return [("EXTRA", 7)]

            def generate_output(self, output_args, **options):
                return "return EXTRA"

        module = build(lambda graph, x, y: x)
        module.graph.set_codegen(Extra())
        assert module(1, 2) == 7

    def test_defaults_change_nothing(self) -> None:
        codegen = fx.CodeGen()
        assert codegen.process_inputs(1, 2) == (1, 2)
        assert codegen.process_outputs(3) == 3
        assert codegen.additional_globals() == []


class TestComments:
    def module(self) -> fx.GraphModule:
        def forward(x):
            y = torch.relu(x) + torch.neg(x)
            return y * 2

        module = fx.symbolic_trace(forward)
        for node in module.graph.nodes:
            node.meta["val"] = torch.ones(2, 3)
        return module

    def test_source_lines_stand_once_above_the_lines_they_made(self) -> None:
        text = self.module().print_readable(print_output=False)
        assert text.count("y = torch.relu(x) + torch.neg(x)") == 1
        assert text.index("y = torch.relu(x) + torch.neg(x)") < text.index("relu = torch.relu(x)")
        assert text.count("return y * 2") == 1

    def test_shapes_stand_at_line_ends(self) -> None:
        text = self.module().print_readable(print_output=False)
        assert "relu = torch.relu(x)  # f32[2, 3]" in text

    def test_inputs_have_lines_of_their_own(self) -> None:
        lines = self.module().print_readable(print_output=False).splitlines()
        assert lines[2].strip() == "# x: f32[2, 3]"

    def test_several_results(self) -> None:
        module = fx.symbolic_trace(lambda x: torch.max(x, dim=0))
        next(node for node in module.graph.nodes if node.name == "max_1").meta["val"] = torch.ones(2, 3).max(dim=0)
        assert "# (f32[3], i64[3])" in module.print_readable(print_output=False)

    def test_strides_and_devices_on_request(self) -> None:
        text = self.module().print_readable(print_output=False, include_stride=True, include_device=True)
        assert "# f32[2, 3][3, 1]cpu" in text

    def test_colours_on_request(self) -> None:
        assert "\033[" in self.module().print_readable(print_output=False, colored=True)
        assert "\033[" not in self.module().print_readable(print_output=False)

    def test_what_is_printed_is_what_runs(self) -> None:
        module = self.module()
        printed = module.graph.python_code("self", verbose=True)
        scope = dict(printed.globals)
        exec(printed.src, scope)
        x = torch.randn(3)
        assert torch.equal(scope["forward"](module, x), module(x))
        plain = [line.split("#")[0].rstrip() for line in printed.src.splitlines()]
        assert [line for line in plain if line] == [line for line in module.code.splitlines() if line.strip()]


class TestPyTreeInputs:
    def test_the_call_takes_containers_and_the_program_leaves(self) -> None:
        module = fx.symbolic_trace(lambda x, y: [x["a"] + y, x["b"]], concrete_args={"x": {"a": fx.PH, "b": fx.PH}})
        assert "fx_pytree.tree_flatten_spec([x, y], self._in_spec)" in module.code
        assert "pytree.tree_unflatten(" in module.code
        assert module({"a": 1, "b": 2}, 3) == [4, 2]

    def test_another_structure_is_refused(self) -> None:
        module = fx.symbolic_trace(lambda x: x["a"], concrete_args={"x": {"a": fx.PH}})
        with pytest.raises(ValueError, match="argument 0 does not have the structure"):
            module({"b": 1})
