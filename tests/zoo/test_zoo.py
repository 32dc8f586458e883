"""The zoo by name: what can be asked for, what comes back, and what a wrong name is told."""

import pytest
import torch
import torch.fx

from torchgraft import zoo
from torchgraft.errors import GraftError

# name: (parameters, nodes of a torch.fx trace, shape of the result for a batch of two)
EXPECTED = {
    "mlp": (1_072, 5, (2, 16)),
    "resnet18": (11_689_512, 71, (2, 1000)),
    "resnet34": (21_797_672, 127, (2, 1000)),
    "resnet50": (25_557_032, 177, (2, 1000)),
    "resnet101": (44_549_160, 347, (2, 1000)),
    "resnet152": (60_192_808, 517, (2, 1000)),
    "transformer": (11_640_320, 479, (2, 32, 4096)),
    "deep_recommender": (19_788_136, 15, (2, 17768)),
    "learning_to_paint": (11_209_857, 74, (2, 65)),
}


def test_names_are_all_expected():
    assert zoo.names() == list(EXPECTED)


@pytest.mark.zoo
@pytest.mark.parametrize("name", EXPECTED)
def test_model(name):
    parameters, nodes, shape = EXPECTED[name]
    model = zoo.create(name).eval()
    inputs = zoo.example_inputs(name, batch=2)
    traced = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        result = model(*inputs)
        assert torch.equal(traced(*inputs), result)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert len(traced.graph.nodes) == nodes
    assert tuple(result.shape) == shape
    assert result.isfinite().all()


@pytest.mark.parametrize("name", EXPECTED)
def test_example_inputs_are_the_same_on_every_call_and_leave_the_random_state_alone(name):
    state = torch.get_rng_state()
    first = zoo.example_inputs(name, batch=3)
    second = zoo.example_inputs(name, batch=3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(len(value) == 3 for value in first)
    assert torch.equal(torch.get_rng_state(), state)


def test_options_reach_the_constructor_and_sizes_the_inputs():
    model = zoo.create("deep_recommender", items=50, hidden=(8, 4))
    assert model(*zoo.example_inputs("deep_recommender", batch=2, items=50)).shape == (2, 50)


@pytest.mark.parametrize("lookup", [zoo.create, zoo.example_inputs])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "resnet5",
            "no model named 'resnet5' in torchgraft.zoo; did you mean 'resnet50' or 'resnet152' or 'resnet34'?",
        ),
        (
            "learning-to-paint",
            "no model named 'learning-to-paint' in torchgraft.zoo; did you mean 'learning_to_paint'?",
        ),
        (
            "vgg",
            "no model named 'vgg' in torchgraft.zoo; known: mlp, resnet18, resnet34, resnet50, resnet101, resnet152, "
            "transformer, deep_recommender, learning_to_paint",
        ),
    ],
)
def test_unknown_name(lookup, name, message):
    with pytest.raises(GraftError) as caught:
        lookup(name)
    assert str(caught.value) == message
