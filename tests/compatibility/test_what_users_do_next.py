"""Levels of capture times what users go on to do, over small models of every kind, with the model itself as the control.
Every use that works on the model works on its program and gives the same; models of libraries are tried under the marker `zoo`.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from tests.compatibility.small_models import MODELS, AttentionBlock, Given
from tests.compatibility.uses import OF_PROGRAMS, SLOW, USES
from tests.torch_versions import TORCH

LEVELS = ("symbolic", "module", "function", "aten", "core_aten")
# Models that a symbolic trace refuses: one branches on a size, one asks for the names of its inputs, two have a part that
# counts its calls.
NOT_TRACED = {"convolutions", "keywords", "kept whole", "many results"}
# A part that no graph can say is kept whole by capture alone; torch.fx cannot assign to an item of a proxy.
NOT_TRACED_AGAIN = {
    "kept whole": "symbolic_trace", "many results": "symbolic_trace", "in place": "torch.fx.symbolic_trace"
}  # fmt: skip
# For the test of every day each model is put to the slow uses at one level, and each level with a third of the models.
_FAST = {(name, LEVELS[1 + number % 2]) for number, name in enumerate(MODELS)}


# What operators were chosen by is checked, as docs/capture.md says: types and modes at core_aten, the type of a tensor that a
# number is put into at aten.
REFUSED = {"core_aten": {"double", "autocast", "other mode"}, "aten": {"double", "autocast"}}
# torch.func.grad of an LSTM in core ATen: a decomposition of torch's squeezes what it must not.
NOT_LOWERED: set[tuple[str, str, str]] = set()
# Before torch 2.13 torch.compile has no way to copy an object (a cache) without leaving the graph.
NOT_COMPILED = {("many results", "torch.compile, fullgraph")} if TORCH < (2, 13) else set()


def captured(model: nn.Module, given: Given, level: str) -> torchgraft.GraphModule:
    """A program that has never run."""
    if level == "symbolic":
        return torchgraft.symbolic_trace(model, {"mask": None} if isinstance(model, AttentionBlock) else None)
    return torchgraft.capture(model, given.args, given.kwargs, level=level)


def cases() -> Iterator[Any]:
    for level in LEVELS:
        for model in MODELS:
            if level == "symbolic" and model in NOT_TRACED:
                continue
            for use in USES:
                if NOT_TRACED_AGAIN.get(model, "-") in use or (level, model, use) in NOT_LOWERED:
                    continue
                if (model, use) in NOT_COMPILED:
                    continue
                is_slow = use in SLOW and (model, level) not in _FAST
                if is_slow and level in REFUSED:
                    continue  # compilers are tried on these levels with real models, in tests/models
                yield pytest.param(level, model, use, marks=[pytest.mark.slow] if is_slow else [])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is in a result, those of objects (a cache of keys and values, say) included; a class or function by its name."""
    if isinstance(value, dict):
        parts = {f"[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, tuple | list):
        parts = {f"[{index}]": item for index, item in enumerate(value)}
    elif isinstance(value, torch.Tensor) or callable(value) or not hasattr(value, "__dict__"):
        yield path, getattr(value, "__name__", value) if callable(value) else value
        return
    else:
        parts = {f".{name}": item for name, item in vars(value).items()}
    for name, part in parts.items():
        yield from leaves(part, path + name)


def assert_same(found: Any, expected: Any) -> None:
    """The same contents, of the same class on the outside."""
    assert isinstance(
        found, type(expected)
    )  # an Interpreter gives the immutable containers of the graph, as torch.fx does
    contents, wanted = dict(leaves(found)), dict(leaves(expected))
    assert list(contents) == list(wanted)
    for path, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                contents[path], value, rtol=1e-4, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}"
            )
        else:
            assert contents[path] == value, path


def check(make: Callable[[], nn.Module], inputs: Callable[[int], Given], level: str, use: str) -> None:
    """The use on the model, then on its program; skipped where the model does not survive it."""
    torch.manual_seed(0)
    model = make().eval()

    def same_inputs(size: int) -> Given:
        torch.manual_seed(size)
        return inputs(size)

    program = captured(copy.deepcopy(model), same_inputs(2), level)
    try:
        expected = USES[use](copy.deepcopy(model), same_inputs)
    except Exception as error:
        if use in OF_PROGRAMS:
            raise
        pytest.skip(f"the model itself fails: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}")
    found = USES[use](program, same_inputs)
    assert_same(found, expected)


@pytest.mark.parametrize(("level", "model", "use"), list(cases()))
def test_what_works_on_the_model_works_on_the_program(level: str, model: str, use: str) -> None:
    make, inputs = MODELS[model]
    try:
        check(make, inputs, level, use)
    except torchgraft.GuardError:
        assert use in REFUSED.get(level, ()) and (level != "aten" or model == "in place")


@pytest.mark.parametrize("model", sorted(NOT_TRACED))
def test_models_that_are_not_traced_symbolically_are_refused(model: str) -> None:
    with pytest.raises(torchgraft.TraceError):
        torchgraft.symbolic_trace(MODELS[model][0]())


# ---- models of libraries ----


def _library(name: str) -> Any:
    """A library, or a skip where it is not installed. transformers and timm import torchvision themselves, if there is one."""
    try:
        from benchmarks.coverage.torchvision_models import import_torchvision

        import_torchvision()
    except ImportError:
        pass
    return pytest.importorskip(name)


def _language_model(kind: str, **options: Any) -> tuple[Callable[[], nn.Module], Callable[[int], Given]]:
    def make() -> nn.Module:
        transformers = _library("transformers")
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = getattr(transformers, f"{kind}Config")(**{**sizes, "vocab_size": 99, **options})
        return transformers.AutoModel.from_config(config)

    return make, lambda n: Given((torch.randint(1, 99, (n, 7)),))


def _image_model(library: str, name: str, size: int = 64) -> tuple[Callable[[], nn.Module], Callable[[int], Given]]:
    def make() -> nn.Module:
        if library == "timm":
            return _library("timm").create_model(name, num_classes=5)
        return getattr(_library("torchvision").models, name)(num_classes=5)

    return make, lambda n: Given((torch.randn(n, 3, size, size),))


GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
LIBRARY_MODELS = {
    "bert": _language_model("Bert"),
    "gpt2": _language_model("GPT2", **GPT2_SIZES),
    "qwen2": _language_model("Qwen2", num_key_value_heads=1, use_cache=False),
    "albert": _language_model("Albert", embedding_size=16),
    "timm resnet": _image_model("timm", "resnet18"),
    "timm vit": _image_model("timm", "vit_tiny_patch16_224", 224),
    "timm convnext": _image_model("timm", "convnext_atto"),
    "torchvision resnet": _image_model("torchvision", "resnet18"),
    "torchvision mobilenet": _image_model("torchvision", "mobilenet_v3_small"),
    "torchvision swin": _image_model("torchvision", "swin_t"),
}


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("use", list(USES))
@pytest.mark.parametrize("model", list(LIBRARY_MODELS))
@pytest.mark.parametrize("level", LEVELS[1:])
def test_models_of_libraries(level: str, model: str, use: str) -> None:
    if (level, model) == ("module", "torchvision swin") and "symbolic_trace" in use:
        pytest.skip(
            "torchvision wraps its attention for torch.fx; capture keeps that one call, and it branches on sizes"
        )
    make, inputs = LIBRARY_MODELS[model]
    check(make, inputs, level, use)
