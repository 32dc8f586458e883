"""Attributes that a program refers to: shared with the model, by dotted path, with only the containers new.
What happens to them in copies of the module is in test_graph_module.py.
"""

import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.codegen.attributes import Adoption, assign_attribute, place_attribute


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.plain = torch.ones(2)
        self.number = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.unused = nn.Linear(2, 2)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def destination() -> nn.Module:
    return nn.Module()


class TestAdoption:
    @pytest.mark.parametrize("name", ["linear", "weight", "kept", "passing", "plain", "number"])
    def test_the_very_object_is_shared(self, model: Model, destination: nn.Module, name: str) -> None:
        Adoption(model, destination).adopt(f"inner.{name}")
        assert getattr(destination.inner, name) is getattr(model.inner, name)

    def test_containers_are_new_and_hold_only_what_was_asked_for(self, model: Model, destination: nn.Module) -> None:
        adoption = Adoption(model, destination)
        adoption.adopt("inner.linear")
        adoption.adopt("inner.weight")
        assert type(destination.inner) is nn.Module
        assert sorted(destination.state_dict()) == ["inner.linear.bias", "inner.linear.weight", "inner.weight"]

    def test_a_container_has_the_mode_of_the_original(self, model: Model, destination: nn.Module) -> None:
        model.inner.eval()
        Adoption(model, destination).adopt("inner.linear")
        assert not destination.inner.training

    def test_what_lies_inside_a_module_taken_whole_comes_along(self, model: Model, destination: nn.Module) -> None:
        adoption = Adoption(model, destination)
        adoption.adopt("inner")
        adoption.adopt("inner.linear.weight")
        assert destination.inner is model.inner

    def test_the_other_way_round(self, model: Model, destination: nn.Module) -> None:
        adoption = Adoption(model, destination)
        adoption.adopt("inner.linear.weight")
        adoption.adopt("inner")
        assert destination.inner is model.inner
        assert destination.inner.linear.weight is model.inner.linear.weight

    def test_a_module_under_two_names_stays_one(self, model: Model, destination: nn.Module) -> None:
        model.again, model.whole = model.inner, model.inner.linear
        adoption = Adoption(model, destination)
        adoption.adopt("inner.linear")
        adoption.adopt_state(frozenset())
        assert destination.again is destination.inner and destination.whole is destination.inner.linear
        destination.double().inner.kept.zero_()
        assert destination.state_dict()["again.kept"].tolist() == [0.0, 0.0]

    def test_only_what_was_in_the_state_dict_is_in_the_new_one(self, model: Model, destination: nn.Module) -> None:
        adoption = Adoption(model, destination)
        for name in ("kept", "passing", "plain"):
            adoption.adopt(f"inner.{name}")
        assert list(destination.state_dict()) == ["inner.kept"]

    def test_a_plain_tensor_follows_the_module_to_other_types(self, model: Model, destination: nn.Module) -> None:
        Adoption(model, destination).adopt("inner.plain")
        assert destination.double().inner.plain.dtype is torch.float64

    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            ("gone", "Model has no attribute 'gone'"),
            ("inner.gone", "'inner' has no attribute 'gone'"),
            ("inner.gone.weight", "'inner' has no attribute 'gone'"),
        ],
    )
    def test_a_missing_attribute_is_named(self, model: Model, destination: nn.Module, path: str, reason: str) -> None:
        with pytest.raises(AttributeError, match=f"refers to '{path}', but {reason}; add the attribute"):
            Adoption(model, destination).adopt(path)


class TestPlacing:
    def test_a_tensor_becomes_a_buffer(self, destination: nn.Module) -> None:
        place_attribute(destination, "a", torch.ones(1), persistent=True)
        place_attribute(destination, "b", torch.ones(1), persistent=False)
        assert [name for name, _ in destination.named_buffers()] == ["a", "b"]
        assert list(destination.state_dict()) == ["a"]

    def test_a_parameter_stays_one(self, destination: nn.Module) -> None:
        place_attribute(destination, "a", nn.Parameter(torch.ones(1)), persistent=True)
        assert [name for name, _ in destination.named_parameters()] == ["a"]

    def test_another_tensor_takes_the_place_of_one(self, destination: nn.Module) -> None:
        place_attribute(destination, "a", 3, persistent=True)
        place_attribute(destination, "a", torch.ones(1), persistent=True)
        assert torch.equal(destination.a, torch.ones(1))

    def test_paths_are_made(self, destination: nn.Module) -> None:
        assign_attribute(destination, "a.b.c", torch.ones(1))
        assert list(destination.state_dict()) == ["a.b.c"]


class TestRootAsADict:
    def graph(self) -> fx.Graph:
        graph = fx.Graph()
        x = graph.call_module("a", (graph.placeholder("x"),))
        graph.output(graph.call_function(torch.add, (x, graph.get_attr("a.weight"))))
        return graph

    def test_outer_paths_come_first(self) -> None:
        linear, weight = nn.Linear(2, 2), nn.Parameter(torch.zeros(2, 2))
        module = fx.GraphModule({"a.weight": weight, "a": linear}, self.graph())
        assert module.a is linear
        assert module.a.weight is weight

    def test_a_missing_entry_is_named(self) -> None:
        with pytest.raises(fx.GraphError, match="referenced target a.weight.*Add it to the dict"):
            fx.GraphModule({"a": nn.ReLU()}, self.graph())

    def test_another_kind_of_root_is_refused(self) -> None:
        with pytest.raises(fx.GraphError, match="Unsupported type list.*nn.Module or a dict"):
            fx.GraphModule([], fx.Graph())
