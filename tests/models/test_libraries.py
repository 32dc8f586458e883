"""Models of transformers, timm and torchvision at every level, and what their users do next; `make test-models` installs them."""

from __future__ import annotations

import copy
import io
from importlib.util import find_spec

import pytest
import torch
from torch.utils import _pytree as pytree

import torchgraft
from benchmarks.coverage import language_models, timm_models, torchvision_models
from benchmarks.coverage.comparison import difference

if not all(map(find_spec, ("timm", "transformers", "torchvision"))):
    pytest.skip("make test-models installs timm, transformers and torchvision", allow_module_level=True)

COLLECTIONS = {"transformers": language_models, "timm": timm_models, "torchvision": torchvision_models}
CHOSEN = {
    "transformers": ["bert", "gpt2", "llama", "qwen2", "opt", "mamba", "mixtral"],
    "timm": ["vision_transformer", "convnext", "davit", "resnet"],
    "torchvision": ["resnet18", "swin_t", "mobilenet_v3_small"],
}
LEVELS = ("module", "function", "aten", "core_aten")


def chosen():
    for collection, names in CHOSEN.items():
        known = {case.name.partition(":")[0]: case for case in reversed(list(COLLECTIONS[collection].cases()))}
        yield from [pytest.param(known[name], id=f"{collection}: {name}") for name in names]


def built(case):
    torch.manual_seed(0)
    model = case.build().eval()
    torch.manual_seed(1)
    return model, case.example()


def outcome(run, inputs):
    torch.manual_seed(2)
    given = copy.deepcopy(inputs)
    with torch.no_grad():
        return run(*given.args, **given.kwargs)


def assert_same(found, expected):
    assert not difference(found, expected)


@pytest.mark.zoo
@pytest.mark.parametrize("case", chosen())
def test_every_level(case):
    model, example = built(case)
    expected = outcome(model, example)
    for level in LEVELS:
        program = torchgraft.capture(model, example.args, example.kwargs, level=level)
        assert not program.meta["kept_whole"].get("")
        assert_same(outcome(program, example), expected)
        for make in case.others.values():
            other = make()
            try:
                found = outcome(program, other)
            except torchgraft.GuardError:
                continue
            assert_same(found, outcome(model, other))


@pytest.mark.zoo
@pytest.mark.parametrize("case", chosen())
def test_what_users_do_next(case):
    model, example = built(case)
    expected = outcome(model, example)
    for level in LEVELS:
        program = torchgraft.capture(model, example.args, example.kwargs, level=level)
        program.load_state_dict(model.state_dict())
        file = io.BytesIO()
        torch.save(program, file)
        file.seek(0)
        assert_same(outcome(torch.load(file, weights_only=False), example), expected)
        torch._dynamo.reset()
        assert_same(outcome(torch.compile(program, backend="eager"), example), expected)
        if level != "module":
            assert_same(outcome(torchgraft.to_fx(program), example), expected)


@pytest.mark.zoo
@pytest.mark.parametrize("case", chosen())
def test_training(case):
    model, example = built(case)
    result = model(*example.args, **example.kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.stack([tensor.sum() for tensor in tensors]).sum().backward()
    gradients = (
        torchgraft.capture_training(model, example.args, example.kwargs).run(*example.args, **example.kwargs).gradients
    )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = max(1.0, float(parameter.grad.abs().max()))
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4 * scale, rtol=1e-3)
