"""Inputs made from an example: copies that share what the example shares, fresh values like its own, other sizes."""

import pytest
import torch

from torchgraft.recording.situations import copied_inputs, fresh_tensor, situations


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def made(*args, **kwargs):
    options = {"seed": 0, "other_values": True, "other_sizes": True, "gradients": True} | kwargs
    return {name: make() for name, make in situations(args, {}, **options)}


def shapes(situation):
    return [tuple(value.shape) for value in situation.args]


def test_copies_share_what_the_originals_share():
    x = torch.randn(3, 4)
    (first, (second, view)), _ = copied_inputs((x, (x, x[0])), {})
    assert first is second and first is not x and torch.equal(first, x)
    first[0] = 7
    assert torch.all(view == 7) and not torch.any(x == 7)


def test_copies_keep_requires_grad_and_drop_gradients():
    leaf = torch.randn(3, requires_grad=True)
    leaf.grad = torch.ones(3)
    (copied, computed), _ = copied_inputs((leaf, leaf * 2), {})
    assert copied.requires_grad and copied.grad is None and copied.is_leaf
    assert computed.requires_grad and computed.is_leaf


def test_copies_of_what_cannot_be_copied():
    source, lock = torch.Generator().manual_seed(3), (value for value in ())
    (first, second, tensor), _ = copied_inputs((source, lock, torch.ones(2)), {})
    assert first is not source and torch.equal(first.get_state(), source.get_state())
    assert second is lock


def test_integers_stay_in_range(generator):
    example = torch.tensor([[3, 9], [5, 3]])
    drawn = fresh_tensor(example, (50, 2), generator)
    assert drawn.dtype is torch.int64 and drawn.min() >= 3 and drawn.max() <= 9
    wide = fresh_tensor(example, (200, 2), generator, wide=True)
    assert wide.min() == 0 and wide.max() <= 9


def test_floats_stay_in_range(generator):
    drawn = fresh_tensor(torch.tensor([0.5, 2.0]), (100,), generator)
    assert drawn.dtype is torch.float32 and drawn.min() >= 0.5 and drawn.max() <= 2
    assert fresh_tensor(torch.tensor([0.5, 2.0]), (100,), generator, wide=True).min() < 0


@pytest.mark.parametrize("value", [0.0, 1.0, -4.0])
def test_constant_example_gives_no_constant(value, generator):
    drawn = fresh_tensor(torch.full((20,), value), (20,), generator)
    assert drawn.std() > 0
    assert value == 0 or torch.all(drawn.sign() == torch.tensor(value).sign())


def test_values_that_are_not_finite_stay_in_place(generator):
    example = torch.tensor([1.0, float("-inf"), 2.0, float("nan")])
    drawn = fresh_tensor(example, (4,), generator)
    assert torch.isfinite(drawn).tolist() == [True, False, True, False]


def test_masks(generator):
    assert torch.all(fresh_tensor(torch.ones(20, dtype=torch.bool), (20,), generator))
    assert fresh_tensor(torch.ones(50, dtype=torch.bool), (50,), generator, wide=True).float().mean() < 1


def test_complex_half_and_memory_format(generator):
    assert fresh_tensor(torch.ones(3, dtype=torch.complex64), (3,), generator).dtype is torch.complex64
    assert fresh_tensor(torch.ones(3, dtype=torch.float16), (3,), generator).dtype is torch.float16
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert fresh_tensor(image, image.shape, generator).is_contiguous(memory_format=torch.channels_last)
    assert fresh_tensor(torch.empty(3, 4, device="meta"), (2, 4), generator).shape == (2, 4)


def test_global_random_state_is_not_used():
    before = torch.get_rng_state()
    list(made(torch.randn(3, 4, generator=torch.Generator())))
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes():
    tried = made(torch.rand(2, 3, 64, 64), torch.rand(2, 64), torch.rand(3))
    assert list(tried) == [
        "example",
        "fresh values",
        "other values",
        "inputs with grad",
        "batch 2 -> 3",
        "batch 2 -> 1",
        "size 3 -> 4",
        "size 64 -> 32",
    ]
    assert shapes(tried["batch 2 -> 3"]) == [(3, 3, 64, 64), (3, 64), (3,)]
    assert shapes(tried["batch 2 -> 1"]) == [(1, 3, 64, 64), (1, 64), (3,)]
    assert shapes(tried["size 3 -> 4"]) == [(2, 4, 64, 64), (2, 64), (4,)]
    assert shapes(tried["size 64 -> 32"]) == [(2, 3, 32, 32), (2, 32), (3,)]


def test_batch_of_one():
    assert [name for name in made(torch.rand(1, 5)) if "batch" in name] == ["batch 1 -> 2", "batch 1 -> 3"]


def test_inputs_with_grad():
    tokens = torch.tensor([1, 2])
    assert "inputs with grad" not in made(tokens)
    assert "inputs with grad" not in made(torch.ones(2, requires_grad=True))
    assert "inputs with grad" not in made(torch.ones(2), gradients=False)
    situation = made(torch.ones(2), tokens)["inputs with grad"]
    assert [value.requires_grad for value in situation.args] == [True, False]


def test_without_tensors_there_is_only_the_example():
    assert list(made(3, "text")) == ["example"]


def test_what_was_not_asked_for():
    assert list(made(torch.ones(2), other_values=False, other_sizes=False)) == ["example"]
