"""The Transformer attends as it says, and one symbolic trace of it serves every batch and length."""

import pytest
import torch
import torch.fx

from torchgraft.errors import GraftError
from torchgraft.zoo.transformer import Transformer, transformer

SMALL = {"width": 32, "heads": 4, "vocabulary": 50, "positions": 16}


def ids(batch, length):
    return torch.randint(50, (batch, length))


@pytest.mark.parametrize("attention", ["softmax", "fused"])
@pytest.mark.parametrize("causal", [True, False])
def test_one_trace_serves_other_batches_and_lengths(attention, causal):
    model = transformer(layers=2, attention=attention, causal=causal, **SMALL).eval()
    traced = torch.fx.symbolic_trace(model)
    for batch, length in [(1, 1), (2, 5), (3, 16)]:
        tokens = ids(batch, length)
        assert torch.equal(traced(tokens), model(tokens))
        assert model(tokens).shape == (batch, length, 50)


@pytest.mark.parametrize("causal", [True, False])
def test_both_attentions_agree(causal):
    written_out = transformer(layers=2, causal=causal, **SMALL).eval()
    fused = transformer(layers=2, causal=causal, attention="fused", **SMALL).eval()
    fused.load_state_dict(written_out.state_dict())
    tokens = ids(2, 9)
    torch.testing.assert_close(written_out(tokens), fused(tokens))


@pytest.mark.parametrize("causal", [True, False])
def test_only_the_encoder_sees_later_tokens(causal):
    model = transformer(layers=2, causal=causal, **SMALL).eval()
    tokens = ids(1, 8)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 50
    first, second = model(tokens), model(changed)
    assert torch.allclose(first[:, :5], second[:, :5], atol=1e-6) is causal
    assert not torch.allclose(first[:, 5:], second[:, 5:], atol=1e-3)


def test_positions_matter():
    model = transformer(layers=1, causal=False, **SMALL).eval()
    result = model(torch.zeros(1, 4, dtype=torch.long))
    assert not torch.allclose(result[:, 0], result[:, 1], atol=1e-3)


def test_layers_add_the_same_number_of_nodes_each():
    with torch.device("meta"):
        counts = [len(torch.fx.symbolic_trace(transformer(layers, **SMALL)).graph.nodes) for layers in (1, 2, 12)]
    assert counts[2] - counts[1] == 10 * (counts[1] - counts[0])


def test_gradients_reach_every_parameter():
    model = transformer(layers=2, **SMALL)
    model(ids(2, 16)).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_impossible_options():
    with pytest.raises(GraftError, match="width 32 is not a multiple of 5 heads\nchange one of them"):
        Transformer(width=32, heads=5)
    with pytest.raises(GraftError, match="unknown attention 'flash'\nuse one of: softmax, fused"):
        Transformer(attention="flash")
