"""Interpreter and Transformer: running and rewriting a graph node by node, values freed, errors annotated.
Behaviour common with torch.fx is examined in tests/compatibility/.
"""

import weakref

import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.ir.contexts import enter_context, exit_context


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return torch.relu(self.linear(x)) * scale + self.linear.weight.sum()


@pytest.fixture
def module() -> fx.GraphModule:
    return fx.symbolic_trace(Model())


def x() -> torch.Tensor:
    return torch.tensor([[1.0, -2.0]])


class TestRunning:
    def test_the_result_is_that_of_the_module(self, module: fx.GraphModule) -> None:
        assert torch.equal(fx.Interpreter(module).run(x(), 3.0), module(x(), 3.0))

    def test_defaults_of_inputs(self, module: fx.GraphModule) -> None:
        assert torch.equal(fx.Interpreter(module).run(x()), module(x()))

    def test_a_missing_input_is_named(self, module: fx.GraphModule) -> None:
        with pytest.raises(fx.GraphError, match="parameter x, but one was not passed in"):
            fx.Interpreter(module).run()

    def test_variable_inputs(self) -> None:
        module = fx.symbolic_trace(lambda *args: args[0] + args[1])
        assert fx.Interpreter(module).run(1, 2) == 3

    def test_variable_keyword_inputs_come_last_as_a_dict(self) -> None:
        module = fx.symbolic_trace(lambda x, **options: x + options["k"])
        assert fx.Interpreter(module).run(1, {"k": 2}) == 3

    def test_structured_inputs_and_outputs(self) -> None:
        module = fx.symbolic_trace(lambda x: {"sum": x["a"] + x["b"]}, concrete_args={"x": {"a": fx.PH, "b": fx.PH}})
        interpreter = fx.Interpreter(module)
        assert interpreter.run({"a": 1, "b": 2}) == {"sum": 3}
        assert interpreter.run(1, 2, enable_io_processing=False) == [3]

    def test_another_graph_over_the_same_module(self, module: fx.GraphModule) -> None:
        graph = fx.Graph()
        graph.output(graph.call_module("linear", (graph.placeholder("x"),)))
        assert torch.equal(fx.Interpreter(module, graph=graph).run(x()), module.linear(x()))

    def test_values_given_beforehand_are_not_computed(self, module: fx.GraphModule) -> None:
        relu = module.graph.find_nodes(op="call_function", target=torch.relu)[0]
        seen = []

        class Seeing(fx.Interpreter):
            def run_node(self, n):
                seen.append(n.name)
                return super().run_node(n)

        given = torch.zeros(1, 2)
        result = Seeing(module).run(x(), 2.0, initial_env={relu: given})
        assert "relu" not in seen
        assert torch.equal(result, given + module.linear.weight.sum())

    def test_boxed_run_empties_the_list(self, module: fx.GraphModule) -> None:
        values = [x(), 2.0]
        assert torch.equal(fx.Interpreter(module).boxed_run(values), module(x()))
        assert values == []

    def test_boxed_run_wants_a_value_for_every_input(self, module: fx.GraphModule) -> None:
        with pytest.raises(fx.GraphError, match="1 value for 2 inputs"):
            fx.Interpreter(module).boxed_run([x()])

    def test_a_graph_without_an_output_returns_nothing(self) -> None:
        graph = fx.Graph()
        graph.placeholder("x")
        assert fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(1) is None

    def test_it_can_be_used_again(self, module: fx.GraphModule) -> None:
        interpreter = fx.Interpreter(module)
        assert torch.equal(interpreter.run(x()), interpreter.run(x()))

    def test_edits_are_seen_by_the_next_run_of_a_new_interpreter(self, module: fx.GraphModule) -> None:
        module.graph.find_nodes(op="call_function", target=torch.relu)[0].target = torch.neg
        assert torch.equal(fx.Interpreter(module).run(x()), module(x()))


class TestFreeing:
    def run(self, collect: bool) -> list[bool]:
        alive = []

        class Watching(fx.Interpreter):
            def call_function(self, target, args, kwargs):
                if target is torch.neg:
                    alive.append(self.reference() is not None)
                result = super().call_function(target, args, kwargs)
                if target is torch.relu:
                    self.reference = weakref.ref(result)
                return result

        module = fx.symbolic_trace(lambda x: torch.neg(torch.relu(x).abs()))
        Watching(module, garbage_collect_values=collect).run(torch.ones(2))
        return alive

    def test_values_are_dropped_after_their_last_use(self) -> None:
        assert self.run(True) == [False]

    def test_or_kept_on_request(self) -> None:
        assert self.run(False) == [True]

    def test_env_holds_what_is_still_needed(self, module: fx.GraphModule) -> None:
        interpreter = fx.Interpreter(module, garbage_collect_values=False)
        interpreter.run(x())
        assert set(interpreter.env) == set(module.graph.nodes)


class TestOverriding:
    def test_each_opcode_has_its_method(self, module: fx.GraphModule) -> None:
        seen = []

        class Noting(fx.Interpreter):
            pass

        for name in ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output"):

            def method(self, target, args, kwargs, name=name):
                seen.append((name, target))
                return getattr(fx.Interpreter, name)(self, target, args, kwargs)

            setattr(Noting, name, method)
        Noting(module).run(x())
        assert [(node.op, node.target) for node in module.graph.nodes] == seen

    def test_fetching_a_missing_attribute_is_explained(self, module: fx.GraphModule) -> None:
        with pytest.raises(fx.GraphError, match="nonexistent target linear.gone: 'linear' has no attribute 'gone'"):
            fx.Interpreter(module).fetch_attr("linear.gone")

    def test_a_missing_value_is_named(self, module: fx.GraphModule) -> None:
        add = module.graph.find_nodes(op="call_module")[0]
        with pytest.raises(fx.GraphError, match="Node linear referenced nonexistent value x! Run Graph.lint"):
            fx.Interpreter(module).run_node(add)

    def test_names_of_submodules(self, module: fx.GraphModule) -> None:
        assert fx.Interpreter(module).submodules["linear"] is module.linear


def failing(x):
    raise ValueError("on purpose")


class TestErrors:
    def test_the_node_and_the_users_line_are_named(self, module: fx.GraphModule) -> None:
        with pytest.raises(RuntimeError) as caught:
            fx.Interpreter(module).run(torch.ones(1, 3))
        notes = "\n".join(caught.value.__notes__)
        assert "While executing %linear" in notes
        assert "return torch.relu(self.linear(x)) * scale" in notes

    def test_not_on_request(self, module: fx.GraphModule) -> None:
        interpreter = fx.Interpreter(module)
        interpreter.extra_traceback = False
        with pytest.raises(RuntimeError) as caught:
            interpreter.run(torch.ones(1, 3))
        assert not getattr(caught.value, "__notes__", [])

    def region(self, function, context=(torch.autocast, "cpu")) -> fx.GraphModule:
        graph = fx.Graph()
        value = graph.placeholder("x")
        outer = graph.call_function(enter_context, (torch.no_grad,))
        inner = graph.call_function(enter_context, context)
        value = graph.call_function(function, (value,))
        graph.call_function(exit_context, (inner,))
        graph.call_function(exit_context, (outer,))
        graph.output(value)
        return fx.GraphModule(nn.Module(), graph)

    @pytest.mark.parametrize("run", [lambda m: m(1), lambda m: fx.Interpreter(m).run(1)], ids=["module", "interpreter"])
    def test_regions_are_left_when_something_in_them_fails(self, run) -> None:
        with pytest.raises(ValueError, match="on purpose"):
            run(self.region(failing))
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")

    def test_regions_are_left_when_the_user_interrupts(self) -> None:
        def interrupted(x):
            raise KeyboardInterrupt

        try:
            with pytest.raises(KeyboardInterrupt):
                fx.Interpreter(self.region(interrupted, (torch.no_grad,))).run(1)
            assert torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(True)


class TestTransformer:
    def test_without_overrides_it_is_a_copy_over_the_same_parameters(self, module: fx.GraphModule) -> None:
        result = fx.Transformer(module).transform()
        assert result.code == module.code
        assert result.linear is module.linear
        assert [node.type for node in result.graph.nodes] == [node.type for node in module.graph.nodes]
        assert torch.equal(result(x()), module(x()))

    @pytest.mark.parametrize("function", [lambda x: torch.relu(x), lambda x: torch.relu(x) + x.size(0) - 1])
    def test_a_method_may_make_the_node_itself(self, function) -> None:
        class Replacing(fx.Transformer):
            def call_function(self, target, args, kwargs):
                if target == torch.relu:
                    return self.tracer.create_node("call_function", torch.sigmoid, args, kwargs)
                return super().call_function(target, args, kwargs)

        program = Replacing(fx.symbolic_trace(function)).transform()
        program.graph.lint()
        assert program(torch.zeros(1)) == 0.5

    def test_a_proxy_among_the_arguments_of_a_node_is_its_node(self) -> None:
        class Replacing(fx.Transformer):
            def call_function(self, target, args, kwargs):
                return self.new_graph.call_function(torch.sigmoid, args, kwargs)

        program = Replacing(fx.symbolic_trace(lambda x: torch.relu(x))).transform()
        program.graph.lint()
        assert program(torch.zeros(1)) == 0.5

    def test_metadata_survives(self, module: fx.GraphModule) -> None:
        for number, node in enumerate(module.graph.nodes):
            node.meta["number"] = number
        result = fx.Transformer(module).transform()
        assert [node.meta for node in result.graph.nodes] == [node.meta for node in module.graph.nodes]

    def test_metadata_nobody_asked_for_yet_survives(self, module: fx.GraphModule) -> None:
        result = fx.Transformer(module).transform()
        relu = result.graph.find_nodes(op="call_function", target=torch.relu)[0]
        assert "torch.relu(self.linear(x))" in relu.stack_trace

    def test_metadata_goes_to_everything_a_method_makes(self, module: fx.GraphModule) -> None:
        class Splitting(fx.Transformer):
            def call_function(self, target, args, kwargs):
                if target is torch.relu:
                    return torch.abs(torch.neg(args[0]))
                return super().call_function(target, args, kwargs)

        result = Splitting(module).transform()
        made = [node for node in result.graph.nodes if node.target in (torch.abs, torch.neg)]
        assert len(made) == 2
        assert all("torch.relu(self.linear(x))" in node.stack_trace for node in made)

    def test_metadata_of_the_two_programs_is_apart(self, module: fx.GraphModule) -> None:
        first = next(iter(module.graph.nodes))
        first.meta["k"] = 1
        result = fx.Transformer(module).transform()
        next(iter(result.graph.nodes)).meta["k"] = 2
        assert first.meta["k"] == 1

    def test_regions_survive(self) -> None:
        def forward(x):
            with torch.no_grad():
                y = x * 2
            return y, x * 3

        result = fx.Transformer(fx.symbolic_trace(forward)).transform()
        assert "with torch.no_grad():" in result.code
        frozen, free = result(torch.ones(1, requires_grad=True))
        assert not frozen.requires_grad
        assert free.requires_grad

    def test_arguments_that_a_trace_would_refuse_survive(self) -> None:
        graph = fx.Graph()
        graph.output(graph.call_function(map, (str, graph.placeholder("x"))))
        result = fx.Transformer(fx.GraphModule(nn.Module(), graph)).transform()
        assert list(result([1, 2])) == ["1", "2"]

    def test_constants_survive(self) -> None:
        constant = torch.ones(2)
        module = fx.symbolic_trace(lambda x: x + constant)
        assert torch.equal(fx.Transformer(module).transform()(torch.ones(2)), torch.full((2,), 2.0))

    def test_in_place_operators_and_stores_survive(self) -> None:
        def forward(x):
            x += 1
            x[0] = 5
            return x * 2

        result = fx.Transformer(fx.symbolic_trace(forward)).transform()
        value = torch.zeros(2)
        assert torch.equal(result(value), torch.tensor([10.0, 2.0]))
        assert torch.equal(value, torch.tensor([5.0, 1.0]))
