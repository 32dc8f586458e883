"""GraphModule: a program with its parameters, its generated code, copies, pickles, and what errors inside it say.
Edits and staleness are in tests/ir/test_graph.py; torch's own tools over it in test_graph_module_in_torch.py.
"""

import copy
import gc
import inspect
import io
import linecache
import pickle
import weakref

import pytest
import torch
from torch import nn

import torchgraft as fx


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x):
        return torch.relu(self.linear(x)) + self.passing


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.block(x) * 2


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


def by_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": by_pickle, "torch.save": by_torch_save}
every_way = pytest.mark.parametrize("duplicate", WAYS.values(), ids=WAYS)


@pytest.fixture
def module() -> fx.GraphModule:
    return fx.symbolic_trace(Model())


def x() -> torch.Tensor:
    return torch.tensor([[1.0, -2.0]])


class TestCode:
    def test_the_text_is_what_runs(self, module: fx.GraphModule) -> None:
        assert inspect.getsource(module.forward).strip() == module.code.strip()

    def test_reading_the_code_compiles_nothing_and_running_does(self, module: fx.GraphModule) -> None:
        assert "def forward(self, x):" in module.code
        assert not inspect.isfunction(type(module).__dict__["forward"])
        module(x())
        assert inspect.isfunction(type(module).__dict__["forward"])

    def test_forward_is_found_on_class_and_instance(self, module: fx.GraphModule) -> None:
        assert inspect.isfunction(type(module).forward)
        assert inspect.ismethod(module.forward)
        assert list(inspect.signature(module.forward).parameters) == ["x"]

    def test_recompile_is_allowed_and_returns_the_code(self, module: fx.GraphModule) -> None:
        assert module.recompile().src == module.code

    def test_each_instance_has_a_class_of_its_own_with_the_name_of_the_model(self) -> None:
        first, second = fx.symbolic_trace(Model()), fx.symbolic_trace(Block())
        assert (type(first).__name__, type(second).__name__) == ("Model", "Block")
        assert isinstance(first, fx.GraphModule)
        assert type(first) is not type(second)

    def test_the_text_leaves_with_the_module(self) -> None:
        module = fx.symbolic_trace(Model())
        module(x())
        filename = type(module).forward.__code__.co_filename
        assert filename in linecache.cache
        reference = weakref.ref(module)
        del module
        gc.collect()
        assert reference() is None
        fx.symbolic_trace(Model())(x())  # not before: linecache may be in the middle of its entries when a module goes
        assert filename not in linecache.cache

    def test_printing_shows_modules_and_code(self, module: fx.GraphModule) -> None:
        text = str(module)
        assert "(linear): Linear(" in text
        assert module.code in text
        assert "print_readable()" in text

    def test_nested_programs_are_printed_inside(self, capsys) -> None:
        inner = fx.symbolic_trace(Block())
        outer = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
        outer.add_submodule("inner", inner)
        text = outer.print_readable()
        assert capsys.readouterr().out == text + "\n"
        assert "class Sequential(torch.nn.Module):" in text
        assert "    class inner(torch.nn.Module):" in text

    def test_only_a_graph_can_be_its_graph(self, module: fx.GraphModule) -> None:
        with pytest.raises(fx.GraphError, match="Expected a Graph instance, but got str"):
            module.graph = "graph"


class TestParameters:
    def test_they_are_shared_with_the_model(self) -> None:
        model = Model()
        module = fx.symbolic_trace(model)
        assert module.block.linear is model.block.linear
        assert module.block.passing is model.block.passing

    def test_only_what_the_program_uses_is_there(self, module: fx.GraphModule) -> None:
        assert list(module.state_dict()) == ["block.linear.weight", "block.linear.bias"]

    def test_the_mode_is_the_models(self) -> None:
        assert not fx.symbolic_trace(Model().eval()).training

    def test_constants_of_a_closure_are_no_part_of_the_state(self) -> None:
        constant = torch.ones(2)
        module = fx.symbolic_trace(lambda x: x + constant)
        assert list(module.state_dict()) == []

    @pytest.mark.parametrize(
        "duplicate", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), fx.symbolic_trace]
    )
    def test_constants_keep_their_type_as_they_do_in_the_model(self, duplicate) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.plain = torch.full((2,), 1 / 3)
                self.child = nn.Module()
                self.child.plain = torch.ones(2)
                self.register_buffer("buffer", torch.ones(2))

            def forward(self, x):
                return self.plain * 2, self.child.plain * 2, self.buffer * 2

        program = duplicate(fx.symbolic_trace(Model()))
        types = [value.dtype for value in program.half().float().double()(torch.ones(2))]
        assert types == [value.dtype for value in Model().double()(torch.ones(2))]
        assert torch.equal(program.plain, torch.full((2,), 1 / 3))
        assert {value.device.type for value in program.to("meta").buffers()} == {"meta"}

    @pytest.mark.parametrize("name", ["meta", "code", "graph", "recompile"])
    def test_submodules_with_names_of_its_own_attributes_are_refused(self, name: str) -> None:
        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.add_module(name, nn.ReLU())

            def forward(self, x):
                return getattr(self, name)(x)

        with pytest.raises(fx.GraphError, match=f"attribute '{name}'.*rename"):
            fx.symbolic_trace(Named())


class TestSubmodules:
    def test_add_and_delete(self, module: fx.GraphModule) -> None:
        assert module.add_submodule("a.b", nn.ReLU())
        assert isinstance(module.a.b, nn.ReLU)
        assert module.delete_submodule("a.b")
        assert not module.delete_submodule("a.b")
        assert not module.delete_submodule("gone.b")

    def test_something_else_in_the_way(self, module: fx.GraphModule) -> None:
        module.number = 3
        assert not module.add_submodule("number.b", nn.ReLU())
        assert not module.delete_submodule("number")

    def test_delete_all_unused_keeps_what_nodes_refer_to(self, module: fx.GraphModule) -> None:
        module.add_submodule("block.extra", nn.ReLU())
        module.add_submodule("other.deep", nn.ReLU())
        module.delete_all_unused_submodules()
        assert [name for name, _ in module.named_modules()] == ["", "block", "block.linear"]
        module(x())


@every_way
class TestCopies:
    def test_they_compute_the_same_without_tracing_again(self, duplicate) -> None:
        calls = []

        class Counting(Model):
            def forward(self, x):
                calls.append(1)
                return super().forward(x)

        module = fx.symbolic_trace(Counting())
        clone = duplicate(module)
        assert calls == [1]
        assert torch.equal(clone(x()), module(x()))
        assert clone.code == module.code
        assert type(clone).__name__ == "Counting"

    def test_parameters_and_graphs_are_the_copys_own(self, module: fx.GraphModule, duplicate) -> None:
        clone = duplicate(module)
        assert clone.graph is not module.graph
        assert clone.graph.owning_module is clone
        assert module.graph.owning_module is module
        assert clone.block.linear.weight is not module.block.linear.weight
        with torch.no_grad():
            clone.block.linear.bias.fill_(5)  # more than the ReLU could hide, whatever the weights are
        assert not torch.equal(clone(x()), module(x()))

    def test_edits_of_a_copy_run_in_the_copy_only(self, module: fx.GraphModule, duplicate) -> None:
        before = module(x())
        clone = duplicate(module)
        for node in clone.graph.find_nodes(op="call_function", target=torch.relu):
            node.target = torch.neg
        assert "torch.neg" in clone.code
        assert not torch.equal(clone(x()), before)
        assert torch.equal(module(x()), before)

    def test_metadata_and_attributes_travel(self, module: fx.GraphModule, duplicate) -> None:
        module.meta["k"] = 1
        module.note = "text"
        node = module.graph.find_nodes(op="call_function", target=torch.relu)[0]
        node.meta["k"] = 2
        clone = duplicate(module)
        assert (clone.meta, clone.note) == ({"k": 1}, "text")
        relu = clone.graph.find_nodes(op="call_function", target=torch.relu)[0]
        assert relu.meta["k"] == 2
        assert "torch.relu(self.linear(x))" in relu.stack_trace

    def test_buffers_that_were_not_persistent_stay_so(self, module: fx.GraphModule, duplicate) -> None:
        assert "block.passing" not in duplicate(module).state_dict()

    def test_constants_travel(self, duplicate) -> None:
        constant = torch.ones(2)
        module = fx.symbolic_trace(lambda x: x + constant)
        assert torch.equal(duplicate(module)(x()), x() + 1)

    def test_the_mode_and_hooks_of_torch_travel(self, duplicate) -> None:
        module = fx.symbolic_trace(Model().eval())
        assert not duplicate(module).training

    def test_copies_of_copies(self, module: fx.GraphModule, duplicate) -> None:
        assert torch.equal(duplicate(duplicate(module))(x()), module(x()))


class TestShallowCopy:
    def test_it_shares_everything_but_the_tables(self, module: fx.GraphModule) -> None:
        clone = copy.copy(module)
        assert clone.graph is module.graph
        assert clone.block is module.block
        clone.extra = nn.ReLU()
        assert not hasattr(module, "extra")
        assert torch.equal(clone(x()), module(x()))


class TestHooks:
    def test_deepcopy_hooks_see_the_copy(self, module: fx.GraphModule) -> None:
        seen = []
        module._register_deepcopy_hook(seen.append)
        clone = copy.deepcopy(module)
        assert seen == [clone]
        module._unregister_deepcopy_hook(seen.append)
        copy.deepcopy(module)
        assert seen == [clone]

    def test_edit_hooks_are_copied_but_not_pickled(self, module: fx.GraphModule) -> None:
        told = []
        module._register_create_node_hook(told.append)
        copy.deepcopy(module).graph.call_function(torch.neg, (None,))
        assert len(told) == 1
        by_pickle(module).graph.call_function(torch.neg, (None,))
        assert len(told) == 1

    def test_a_hook_registered_on_a_copy_is_the_copys(self, module: fx.GraphModule) -> None:
        told = []
        copy.deepcopy(module)._register_create_node_hook(told.append)
        module.graph.call_function(torch.neg, (None,))
        assert told == []

    def test_forward_hooks_of_torch_run(self, module: fx.GraphModule) -> None:
        seen = []
        module.register_forward_hook(lambda m, inputs, output: seen.append(output))
        assert module(x()) is seen[0]


class TestErrorsInside:
    def test_the_generated_line_the_node_and_the_users_line_are_named(self, module: fx.GraphModule) -> None:
        with pytest.raises(RuntimeError) as caught:
            module(torch.ones(1, 3))
        (note,) = caught.value.__notes__
        assert "generated forward function (Model): block_linear = self.block.linear(x)" in note
        assert "node 'block_linear'" in note
        assert "return torch.relu(self.linear(x)) + self.passing" in note

    def test_the_generated_line_is_in_the_traceback(self, module: fx.GraphModule) -> None:
        with pytest.raises(RuntimeError) as caught:
            module(torch.ones(1, 3))
        assert "block_linear = self.block.linear(x)" in str(caught.getrepr(style="native"))

    def test_the_right_line_inside_a_region_and_with_wraps(self) -> None:
        def forward(x):
            with torch.no_grad():
                y = x + 1
                z = y @ x
            return z

        with pytest.raises(RuntimeError) as caught:
            fx.symbolic_trace(forward)(torch.ones(2, 3))
        assert "node 'matmul'" in caught.value.__notes__[0]
        assert "z = y @ x" in caught.value.__notes__[0]

    def test_programs_inside_programs_each_say_where(self) -> None:
        inner = fx.symbolic_trace(Model())

        class Keep(fx.Tracer):
            def is_leaf_module(self, m, name):
                return True

        outer = nn.Sequential(inner)
        module = fx.GraphModule(outer, Keep().trace(outer), "Outer")
        with pytest.raises(RuntimeError) as caught:
            module(torch.ones(1, 3))
        notes = caught.value.__notes__
        assert "generated forward function (Model)" in notes[0]
        assert "generated forward function (Outer)" in notes[1]

    def test_a_call_with_wrong_arguments_is_reported_as_python_does(self, module: fx.GraphModule) -> None:
        with pytest.raises(TypeError, match=r"forward\(\)"):
            module()

    def test_the_mode_of_torch_is_restored_when_a_region_fails(self) -> None:
        def forward(x):
            with torch.no_grad():
                return x @ x

        module = fx.symbolic_trace(forward)
        with pytest.raises(RuntimeError):
            module(torch.ones(2, 3))
        assert torch.is_grad_enabled()


class TestHooksOfModulesThatShareAGraph:
    def test_all_are_told(self) -> None:
        first = fx.symbolic_trace(lambda x: torch.relu(x))
        second = fx.GraphModule(first, first.graph)
        seen: list[str] = []
        first._register_create_node_hook(lambda node: seen.append("first"))
        second._register_create_node_hook(lambda node: seen.append("second"))
        first.graph.call_function(torch.neg, (next(iter(first.graph.nodes)),))
        assert seen == ["first", "second"]

    def test_one_that_takes_another_graph_is_told_no_more(self) -> None:
        first = fx.symbolic_trace(lambda x: torch.relu(x))
        shared = first.graph
        second = fx.GraphModule(first, shared)
        seen: list[str] = []
        for name, module in (("first", first), ("second", second)):
            module._register_erase_node_hook(lambda node, name=name: seen.append(name))
        second.graph = copy.deepcopy(shared)
        shared.erase_node(shared.call_function(torch.neg, (next(iter(shared.nodes)),)))
        assert seen == ["first"]
        other = second.graph
        other.erase_node(other.call_function(torch.neg, (next(iter(other.nodes)),)))
        assert seen == ["first", "second"]


def test_torchscript_checks_the_mode_too():
    class Model(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x

    script = torch.jit.script(fx.symbolic_trace(Model().eval()))
    assert script(torch.ones(1)).tolist() == [1]
    with pytest.raises(RuntimeError, match="captured in evaluation mode and the module is now in training mode"):
        script.train()(torch.ones(1))


def test_lists_of_hooks_and_the_map_of_lines_have_the_names_that_torch_fx_gives_them():
    program = fx.symbolic_trace(lambda x: x + 1)
    made: list = []
    program._create_node_hooks.append(made.append)
    program.graph.call_function(torch.relu, (next(iter(program.graph.nodes)),))
    assert [node.name for node in made] == ["relu"]
    assert (program._replace_hooks, program._erase_node_hooks) == ([], [])
    assert isinstance(program._lineno_map, dict)
