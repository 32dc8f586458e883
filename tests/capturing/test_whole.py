"""A model that is one call of its program: its checkpoint loads, and copies, pickles and moves are those of the model."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn

from torchgraft import GraphModule, capture


class Through(nn.Module):
    """Goes through numpy, which a graph cannot say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, *more: torch.Tensor, factor: float = 1.0, **options: Any) -> torch.Tensor:
        y = self.norm(self.linear(x)) * self.scale * factor + float(x.detach().numpy().sum())
        return self.dropout(y) if self.training else y


def _captured() -> tuple[Through, GraphModule, torch.Tensor]:
    model, x = Through().eval(), torch.randn(3, 4)
    program = capture(model, (x,))
    assert "" in program.meta["kept_whole"]
    return model, program, x


def test_the_state_dict_is_the_models_own() -> None:
    model, program, x = _captured()
    assert list(program.state_dict()) == list(model.state_dict())
    other = Through().eval()
    program.load_state_dict(other.state_dict())
    assert torch.equal(program(x), other(x)) and torch.equal(model(x), other(x))
    assert [name for name, _ in program.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_arguments_of_every_kind_reach_the_model() -> None:
    model, program, x = _captured()
    assert torch.equal(program(x, x, factor=2.0, note="seen"), model(x, factor=2.0))


def test_it_is_switched_and_moved_like_the_model() -> None:
    model, program, x = _captured()
    program.train()
    torch.manual_seed(0)
    found = program(x)
    torch.manual_seed(0)
    assert torch.equal(found, model.train()(x))
    assert program.double().eval()(x.double()).dtype is torch.float64


def test_copies_have_a_model_of_their_own() -> None:
    model, program, x = _captured()
    stream = io.BytesIO()
    torch.save(program, stream)
    stream.seek(0)
    copies = [
        copy.deepcopy(program),
        pickle.loads(pickle.dumps(program)),
        torch.load(stream, weights_only=False),
    ]
    for other in copies:
        assert torch.equal(other(x), model(x)) and list(other.state_dict()) == list(model.state_dict())
        other.load_state_dict(Through().state_dict())
        assert not torch.equal(other(x), model(x))


def test_unused_modules_are_the_models() -> None:
    model, program, _ = _captured()
    program.delete_all_unused_submodules()
    assert hasattr(model, "linear")


def test_a_method_and_a_function() -> None:
    model, x = Through().eval(), torch.randn(3, 4)
    assert torch.equal(capture(model.forward, (x,))(x), model(x))
    program = capture(lambda value: torch.from_numpy(value.numpy() * 2), (x,))
    assert torch.equal(program(x), x * 2)
