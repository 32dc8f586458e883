"""DeepRecommender has a decoder that mirrors its encoder, and drops only the code between them."""

import torch
from torch import nn

from torchgraft.zoo.deep_recommender import DeepRecommender, rating_inputs


def linear_sizes(model):
    return [(layer.in_features, layer.out_features) for layer in model if isinstance(layer, nn.Linear)]


def test_netflix_sizes():
    with torch.device("meta"):
        model = DeepRecommender()
    assert linear_sizes(model.encoder) == [(17768, 512), (512, 512), (512, 1024)]
    assert linear_sizes(model.decoder) == [(1024, 512), (512, 512), (512, 17768)]
    assert model.dropout.p == 0.8
    assert sum(isinstance(module, nn.SELU) for module in model.modules()) == 6


def test_last_activation_can_be_left_out():
    model = DeepRecommender(items=20, hidden=(4,), last_activation=False)
    assert isinstance(model.decoder[-1], nn.Linear)


def test_drops_only_in_training():
    model = DeepRecommender(items=20, hidden=(8, 64))
    ratings = torch.ones(1, 20)
    assert not torch.equal(model(ratings), model(ratings))
    model.eval()
    assert torch.equal(model(ratings), model(ratings))


def test_rating_inputs_are_sparse_stars():
    (ratings,) = rating_inputs(torch.Generator().manual_seed(0), batch=4)
    assert set(ratings.unique().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    assert 0.005 < (ratings > 0).float().mean() < 0.02
