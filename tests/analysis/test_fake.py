"""What we rely on in torch's private FakeTensorMode, and that looking at a module leaves it alone."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchgraft.analysis.fake import NeedsValues, fake_mode_of, fake_module, fake_tree
from torchgraft.errors import GraftError


def test_a_fake_has_the_shape_dtype_strides_and_device_but_no_data() -> None:
    x = torch.ones(2, 3, dtype=torch.float16).t().requires_grad_()
    mode = fake_mode_of(x)
    (fake,) = fake_tree((x,), mode)
    assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (x.shape, x.dtype, x.stride(), x.device)
    assert fake.requires_grad and fake.grad_fn is None
    with mode, pytest.raises(NeedsValues):
        fake.sum().item()


def test_the_mode_of_fakes_that_are_there_is_used() -> None:
    x = torch.ones(2)
    mode = fake_mode_of(x)
    (fake,) = fake_tree((x,), mode)
    assert fake_mode_of({"a": [fake]}) is mode
    assert fake_tree(fake, mode) is fake


def test_a_module_is_copied_with_its_sharing_and_left_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.second = nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight
            self.register_buffer("count", torch.zeros(1))
            self.plain = torch.ones(3)
            self.history = (torch.ones(1, requires_grad=True) * 2,)

    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mode = fake_mode_of(model)
    fake = fake_module(model, mode)
    assert fake.first.weight is fake.second.weight
    assert type(fake.plain).__name__ == type(fake.history[0]).__name__ == "FakeTensor"
    assert isinstance(fake.first.weight, nn.Parameter)
    with mode:
        fake.count.add_(1)
        fake.first.weight.data.zero_()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.count._version == 0


def test_parameters_that_share_memory_share_it_as_fakes() -> None:
    module = nn.Module()
    whole = torch.zeros(4)
    module.register_buffer("whole", whole)
    module.register_buffer("part", whole[:2])
    fake = fake_module(module, fake_mode_of(module))
    assert fake.whole.untyped_storage()._cdata == fake.part.untyped_storage()._cdata


def test_what_cannot_be_copied_is_said() -> None:
    class Stubborn(nn.Module):
        def __deepcopy__(self, memo: dict[int, object]) -> object:
            raise TypeError("a socket")

    with pytest.raises(
        GraftError, match=r"cannot look at Stubborn without touching it: .*TypeError: a socket.*deepcopy"
    ):
        fake_module(Stubborn(), fake_mode_of())


def test_a_fake_module_has_what_torch_makes_of_each_tensor() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 3)).to(memory_format=torch.channels_last)
    model[2].weight.requires_grad_(False)
    model.register_buffer("whole", torch.arange(6.0))
    model.register_buffer("part", model.whole[2:4])
    model.register_buffer("apart", torch.arange(9.0)[3:5])
    model.register_buffer("complex", torch.ones(2, dtype=torch.complex64).conj())
    model.register_parameter("tied", model[0].weight)
    mode = FakeTensorMode()
    found = dict(fake_module(model, mode).state_dict(keep_vars=True))
    for name, tensor in model.state_dict(keep_vars=True).items():
        expected, fake = mode.from_tensor(tensor), found[name]
        for fact in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout"):
            assert getattr(fake, fact) == getattr(expected, fact) == getattr(tensor, fact), (name, fact)
        assert fake.stride() == tensor.stride() and fake.storage_offset() == tensor.storage_offset()
        assert fake.is_conj() == tensor.is_conj()
        assert isinstance(fake, nn.Parameter) == isinstance(tensor, nn.Parameter) and fake.fake_mode is mode
    memory = {name: fake.untyped_storage()._cdata for name, fake in found.items()}
    assert memory["whole"] == memory["part"] and found["tied"] is found["0.weight"]
    assert len(set(memory.values())) == len(memory) - 2


@pytest.mark.parametrize(
    ("first", "second", "has_groups"),
    [
        ((16, 8), (3, 8, 16), True),
        ((3, 4, 8), (3, 8, 16), False),
        ((8, 16), (16, 16), True),
        ((3, 4, 8), (8, 16), True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_have_the_shape_that_they_have_in_eager(
    first: tuple[int, ...], second: tuple[int, ...], has_groups: bool, dtype: torch.dtype
) -> None:
    ends = torch.tensor([4, 8, 16], dtype=torch.int32) if has_groups else None
    x, weight = torch.randn(first, dtype=dtype), torch.randn(second, dtype=dtype)
    expected = torch._grouped_mm(x, weight, offs=ends)
    mode = fake_mode_of(x)
    fakes = fake_tree((x, weight, ends), mode)
    with mode:
        found = torch._grouped_mm(fakes[0], fakes[1], offs=fakes[2])
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
