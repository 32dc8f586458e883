"""GraphModule made from a graph: roots, attributes, submodules, node hooks, printing, and errors in generated code.

Its life as an nn.Module among others is examined in test_graph_module_as_module.
"""

import inspect
import operator
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.unused = nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("shift", torch.ones(3))
        self.note = "a plain attribute"

    def forward(self, x):
        return self.conv(x) * self.scale + self.shift


def manual_graph(fx: ModuleType):
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("deep.weight")
    hidden = graph.call_module("deep.layer", (x,))
    graph.output(graph.call_function(operator.mul, (hidden, weight)))
    return graph


def test_root_module_gives_only_what_the_graph_names(fx: ModuleType) -> None:
    model = Model()
    module = fx.GraphModule(model, fx.Tracer().trace(model))
    assert sorted(module.state_dict()) == ["conv.0.bias", "conv.0.weight", "scale", "shift"]
    assert not hasattr(module, "unused")
    assert not hasattr(module, "note")
    assert not hasattr(module.conv, "2")
    assert module.get_submodule("conv.0") is model.conv[0]


def test_root_dictionary_is_looked_up_by_qualified_name(fx: ModuleType) -> None:
    layer = nn.Linear(2, 2)
    weight = nn.Parameter(torch.ones(2))
    module = fx.GraphModule({"deep.layer": layer, "deep.weight": weight, "not.used": nn.ReLU()}, manual_graph(fx))
    assert module.deep.layer is layer
    assert module.deep.weight is weight
    assert not hasattr(module, "not")
    x = torch.rand(1, 2)
    assert torch.equal(module(x), layer(x) * weight)


def test_root_dictionary_tensor_becomes_a_buffer(fx: ModuleType) -> None:
    module = fx.GraphModule({"deep.layer": nn.Identity(), "deep.weight": torch.ones(2)}, manual_graph(fx))
    assert list(module.state_dict()) == ["deep.weight"]


def test_root_dictionary_must_hold_every_target(fx: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="deep.weight|deep.layer"):
        fx.GraphModule({"deep.layer": nn.Identity()}, manual_graph(fx))


def test_other_roots_are_refused(fx: ModuleType) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        fx.GraphModule([1, 2], fx.Graph())


def test_parent_targets_do_not_wipe_out_their_children(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    deep = graph.call_module("block.inner", (x,))
    graph.output(graph.call_module("block", (deep,)))
    block = nn.Sequential()
    block.add_module("inner", nn.ReLU())
    module = fx.GraphModule({"block.inner": block.inner, "block": block}, graph)
    assert torch.equal(module(torch.tensor([-1.0])), torch.tensor([0.0]))


def test_class_name(fx: ModuleType) -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    assert type(fx.GraphModule({}, graph)).__name__ == "GraphModule"
    assert type(fx.GraphModule({}, graph, "Chosen")).__name__ == "Chosen"
    assert type(fx.GraphModule({}, graph, class_name="Chosen")).__name__ == "Chosen"


def test_each_graph_module_has_its_own_forward(fx: ModuleType) -> None:
    one = fx.symbolic_trace(lambda x: x + 1)
    two = fx.symbolic_trace(lambda x: x + 2)
    assert (one(0), two(0)) == (1, 2)
    assert type(one) is not type(two)


def test_subclass_of_graph_module(fx: ModuleType) -> None:
    class Special(fx.GraphModule):
        def __init__(self, root, graph, extra) -> None:
            super().__init__(root, graph)
            self.extra = extra

        def more(self):
            return self.extra * 2

    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    module = Special({}, graph, 4)
    assert isinstance(module, Special)
    assert module.more() == 8
    assert module(3) == 3


def test_code_is_text_and_recompile_renews_it(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.relu(x))
    assert "torch.relu" in traced.code
    for node in traced.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.neg
    result = traced.recompile()
    assert "torch.neg" in traced.code
    assert result.src == traced.code
    assert traced(torch.tensor(1.0)).item() == -1.0


def test_forward_has_the_signature_of_the_program(fx: ModuleType) -> None:
    def program(x, y: int = 3, *, z=None):
        return x

    traced = fx.symbolic_trace(program)
    parameters = inspect.signature(traced.forward).parameters
    assert list(parameters) == ["x", "y", "z"]
    assert parameters["y"].default == 3
    assert parameters["y"].annotation is int
    assert parameters["z"].default is None


def test_graph_must_be_a_graph(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: x)
    with pytest.raises((AssertionError, TypeError)):
        traced.graph = "not a graph"


def test_add_submodule(fx: ModuleType) -> None:
    module = fx.symbolic_trace(Model())
    layer = nn.Linear(3, 3)
    assert module.add_submodule("new.deep.layer", layer) is True
    assert module.new.deep.layer is layer
    assert module.add_submodule("conv.extra", nn.ReLU()) is True
    assert module.add_submodule("scale.impossible", nn.ReLU()) is False


def test_added_submodule_can_be_called(fx: ModuleType) -> None:
    module = fx.symbolic_trace(Model())
    module.add_submodule("tail.act", nn.Tanh())
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        new = module.graph.call_module("tail.act", (output.args[0],))
    output.args = (new,)
    module.graph.lint()
    module.recompile()
    x = torch.rand(1, 3)
    assert module(x).max() <= 1.0


def test_delete_submodule(fx: ModuleType) -> None:
    module = fx.symbolic_trace(Model())
    module.add_submodule("extra.layer", nn.Linear(2, 2))
    assert module.delete_submodule("extra.layer") is True
    assert not hasattr(module.extra, "layer")
    assert module.delete_submodule("extra.layer") is False
    assert module.delete_submodule("absent.layer") is False
    assert module.delete_submodule("scale") is False, "a parameter is no submodule"


def test_delete_all_unused_submodules(fx: ModuleType) -> None:
    module = fx.symbolic_trace(Model())
    module.add_submodule("extra.layer", nn.Linear(2, 2))
    module.add_submodule("conv.5", nn.ReLU())
    module.delete_all_unused_submodules()
    assert [name for name, _ in module.named_modules()] == ["", "conv", "conv.0", "conv.1"]
    x = torch.rand(1, 3)
    assert module(x).shape == (1, 3)


def test_print_readable_returns_text_and_prints_on_request(fx: ModuleType, capsys) -> None:
    module = fx.symbolic_trace(Model())
    silent = module.print_readable(print_output=False)
    assert capsys.readouterr().out == ""
    loud = module.print_readable()
    assert capsys.readouterr().out.strip() == loud.strip()
    assert silent == loud
    assert "class Model(torch.nn.Module):" in loud
    assert "def forward(self, x):" in loud
    assert "self.scale" in loud


def test_print_readable_shows_nested_graph_modules(fx: ModuleType) -> None:
    inner = fx.symbolic_trace(lambda x: torch.relu(x))
    graph = fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    outer = fx.GraphModule({"inner": inner}, graph)
    text = outer.print_readable(print_output=False)
    assert text.count("def forward") == 2
    assert "class inner(torch.nn.Module):" in text


def test_text_of_a_graph_module_shows_modules_and_code(fx: ModuleType) -> None:
    module = fx.symbolic_trace(Model())
    text = str(module)
    assert text.startswith("Model(\n  (conv): Module(\n    (0): Linear(in_features=3, out_features=3, bias=True)")
    assert module.code in text
    assert repr(module).startswith("Model(")


def test_errors_in_generated_code_keep_their_type_and_show_the_line(fx: ModuleType, capfd) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x + self.weight

    traced = fx.symbolic_trace(Adds())
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        traced(torch.ones(2))
    printed = capfd.readouterr().err
    told = printed + str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "add = x + weight" in told


def test_create_and_erase_node_hooks(fx: ModuleType) -> None:
    module = fx.symbolic_trace(lambda x: torch.relu(x))
    created, erased = [], []
    module._register_create_node_hook(created.append)
    module._register_erase_node_hook(erased.append)
    graph = module.graph
    output = graph.output_node()
    with graph.inserting_before(output):
        node = graph.call_function(torch.neg, output.args)
    assert created == [node]
    graph.erase_node(node)
    assert erased == [node]


def test_node_hooks_can_be_removed(fx: ModuleType) -> None:
    module = fx.symbolic_trace(lambda x: torch.relu(x))
    seen = []
    hook = seen.append
    module._register_create_node_hook(hook)
    module._unregister_create_node_hook(hook)
    module._register_erase_node_hook(hook)
    module._unregister_erase_node_hook(hook)
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        graph.erase_node(graph.call_function(torch.neg, graph.output_node().args))
    assert seen == []


def test_replace_node_hook(fx: ModuleType) -> None:
    module = fx.symbolic_trace(lambda x: torch.neg(torch.relu(x)))
    seen = []

    def hook(old, new, user):
        seen.append((old.name, new, user.name))

    module._register_replace_node_hook(hook)
    x, relu, negation, output = module.graph.nodes
    relu.replace_all_uses_with(x)
    negation.replace_input_with(x, relu)
    module._unregister_replace_node_hook(hook)
    relu.replace_all_uses_with(x)
    assert seen == [("relu", "x", "neg"), ("x", "relu", "neg")]


def test_replace_hook_as_a_context(fx: ModuleType) -> None:
    module = fx.symbolic_trace(lambda x: torch.neg(torch.relu(x)))
    seen = []
    x, relu, negation, output = module.graph.nodes
    with module._set_replace_hook(lambda old, new, user: seen.append((old, new, user))):
        relu.replace_all_uses_with(x)
    negation.replace_all_uses_with(x)
    assert seen == [(relu, "x", negation)]


def test_meta_is_a_dictionary(fx: ModuleType) -> None:
    module = fx.symbolic_trace(lambda x: x)
    assert module.meta == {}
    module.meta["note"] = 1
    assert module.meta == {"note": 1}


def test_dir_lists_attributes_and_submodules(fx: ModuleType) -> None:
    module = fx.symbolic_trace(Model())
    listed = dir(module)
    for name in ("graph", "code", "recompile", "forward", "conv", "scale", "shift", "add_submodule"):
        assert name in listed


def test_to_folder_can_be_imported(fx: ModuleType, tmp_path: Path, monkeypatch) -> None:
    model = Model().eval()
    module = fx.symbolic_trace(model)
    name = f"dumped_{fx.__name__.replace('.', '_')}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.to_folder(tmp_path / name, "Dumped")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = __import__(name)
    loaded = package.Dumped().eval()
    x = torch.rand(2, 3)
    assert torch.equal(loaded(x), model(x))
    assert sorted(loaded.state_dict()) == sorted(module.state_dict())
    sys.modules.pop(name, None)


def test_to_folder_default_name_and_plain_layers(fx: ModuleType, tmp_path: Path, monkeypatch) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3)

        def forward(self, x):
            return torch.relu(self.linear(x))

    model = Plain()
    name = f"plain_{fx.__name__.replace('.', '_')}"
    fx.symbolic_trace(model).to_folder(str(tmp_path / name))
    monkeypatch.syspath_prepend(str(tmp_path))
    package = __import__(name)
    x = torch.rand(1, 2)
    assert torch.equal(package.FxModule()(x), model(x))
    assert (tmp_path / name / "module.py").exists()
    sys.modules.pop(name, None)


def test_attributes_may_be_added_after_the_fact(fx: ModuleType) -> None:
    module = fx.symbolic_trace(lambda x: x)
    module.register_buffer("table", torch.ones(2))
    module.extra = nn.Linear(1, 1)
    module.note = "text"
    assert sorted(module.state_dict()) == ["extra.bias", "extra.weight", "table"]
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        table = module.graph.get_attr("table")
    output.args = (table,)
    module.recompile()
    assert torch.equal(module(1), torch.ones(2))
