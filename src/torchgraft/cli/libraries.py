"""Models of other libraries for the command line: `torchvision:`, `timm:` and `hf:`, with random weights and inputs that fit.
Nothing is downloaded. What the texts of MODEL and --input mean otherwise is in `models.py`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from torchgraft.cli.library_inputs import fitting_inputs
from torchgraft.cli.models import LoadedModel, read_inputs
from torchgraft.errors import GraftError, one_line, suggestion
from torchgraft.results.tables import amount

if TYPE_CHECKING:
    from torch import nn

Factory = Callable[[Any], "nn.Module"]
PACKAGES = {"torchvision": "torchvision", "timm": "timm", "hf": "transformers"}
_PREFIXES = {package: prefix for prefix, package in PACKAGES.items()}


def library_model(library: str, name: str, full: bool = False, computes: bool = True) -> LoadedModel:
    """The model of that name; GraftError says what is missing."""
    return LIBRARIES[library](name, full, computes)


def known_names(library: str) -> list[str]:
    """The names of models in the zoo, or in a library that is installed."""
    if library == "zoo":
        from torchgraft import zoo

        return zoo.names()
    if library == "hf":
        auto = _part_of_transformers("modeling_auto")
        return sorted({*auto.MODEL_MAPPING_NAMES, *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})
    return sorted(
        _imported("torchvision.models").list_models() if library == "torchvision" else _imported("timm").list_models()
    )


def closest_names(name: str) -> list[str]:
    """The models of that very name, the zoo's first; else those of the zoo with a name like it."""
    from torchgraft import zoo

    found = [f"zoo:{name}"] if name in zoo.names() else []
    for library, package in PACKAGES.items():
        if importlib.util.find_spec(package) is not None:
            with contextlib.suppress(GraftError):
                found += [f"{library}:{name}"] if name in known_names(library) else []
    return found or [f"zoo:{close}" for close in difflib.get_close_matches(name, zoo.names(), 2, 0.6)]


def _imported(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise GraftError(f"cannot import {name}: {error}\ninstall it with: pip install {name}") from error
    except Exception as error:  # torchvision raises RuntimeError where its operators do not fit this torch
        raise GraftError(f"cannot import {package}: {one_line(error)}") from error


def _unknown(library: str, name: str, names: Iterable[str]) -> NoReturn:
    hint = suggestion(name, names, f"`graft models {_PREFIXES[library]}:` lists those it has")
    raise GraftError(f"no model named {name!r} in {library}; {hint}")


# ---- torchvision ----

_IMAGE = "1x3x224x224:float32"
# By the part of torchvision.models that a model lives in; detection takes a list of images.
_VISION_INPUTS = {
    "segmentation": [_IMAGE],
    "video": ["1x3x16x112x112:float32"],
    "optical_flow": ["1x3x128x128:float32"] * 2,
    "detection": ["3x224x224:float32"],
}


def _torchvision(name: str, full: bool, computes: bool) -> LoadedModel:
    _imported("torchvision")
    models = _imported("torchvision.models")
    if name not in models.list_models():
        _unknown("torchvision", name, models.list_models())
    kind = models.get_model_builder(name).__module__.removeprefix("torchvision.models.").partition(".")[0]
    options: dict[str, Any] = {"weights_backbone": None} if kind in ("segmentation", "detection") else {}
    if name in ("inception_v3", "googlenet"):
        options["init_weights"] = False  # it takes half a minute, and these weights are random anyway
    if name.startswith(("mvit", "swin3d")):
        inputs = ["1x3x16x224x224:float32"]
    else:
        inputs = ["1x3x299x299:float32"] if name == "inception_v3" else _VISION_INPUTS.get(kind, [_IMAGE])
    args, kwargs = read_inputs(inputs)
    model = models.get_model(name, weights=None, **options)
    return LoadedModel(model, (([*args],) if kind == "detection" else args, kwargs))


# ---- timm ----


def _timm(name: str, full: bool, computes: bool) -> LoadedModel:
    timm = _imported("timm")
    if not timm.is_model(name):
        _unknown("timm", name, timm.list_models())
    model = timm.create_model(name, pretrained=False)
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size") or (3, 224, 224)
    return LoadedModel(model, read_inputs(["x".join(map(str, (1, *size))) + ":float32"]))


# ---- transformers ----

_MOST_PARAMETERS = 300_000_000  # of a model that is to run in a moment


def _transformers(name: str, full: bool, computes: bool) -> LoadedModel:
    transformers = _imported("transformers")
    transformers.logging.set_verbosity_error()
    with _explained(
        f"cannot import the model {name!r} of transformers"
    ):  # it imports its parts when they are asked for
        factories, configuration = _architecture(transformers, name)
    if not full:
        model, inputs = _small(name, factories, configuration)
        size = _parameters(model)
        note = f"hf:{name} is a small configuration with {size:,} parameters; use --full for its real size"
        return LoadedModel(model, read_inputs(inputs) if inputs else None, note)
    with _explained(f"cannot make the model {name!r} from its configuration"):
        _without_cache(configuration)
        model, note = _without_weights(factories[0], configuration, name, computes)
        inputs = fitting_inputs(model, configuration)
        model = factories[0](configuration) if computes else model
        return LoadedModel(model, read_inputs(inputs) if inputs else None, note)


def _small(name: str, factories: list[Factory], configuration: Any) -> tuple[nn.Module, list[str]]:
    """A small model that runs, and what on. Fields hang together in ways that their names do not tell, so that not every small
    configuration can be built, or runs; the first model that was built is taken where none does."""
    from torchgraft.cli.small_configurations import fewer_layers, smaller

    built: list[nn.Module] = []
    problems: list[Exception] = []
    for make, reduce in itertools.product(factories, (smaller, fewer_layers)):
        try:
            small = _without_cache(reduce(copy.deepcopy(configuration)))
            if reduce is fewer_layers:
                _check_size(make, small)
            model = make(small)
        except Exception as error:  # a library may raise anything
            problems.append(error)
            continue
        inputs = fitting_inputs(model, small)
        if inputs:
            return model, inputs
        built.append(model)
    if built:
        return built[0], []
    raise GraftError(
        f"cannot make a small model {name!r}: {one_line(problems[0])}\nuse --full for the real size"
    ) from problems[0]


def _without_cache(configuration: Any) -> Any:
    """It is for the next word, and one run has none; torch.export refuses it."""
    if hasattr(configuration, "use_cache"):
        configuration.use_cache = False
    return configuration


def _check_size(make: Factory, configuration: Any) -> None:
    import torch

    with torch.device("meta"):
        size = _parameters(make(copy.deepcopy(configuration)))
    if size > _MOST_PARAMETERS:
        raise ValueError(f"with few layers it still has {size:,} parameters")


def _without_weights(make: Factory, configuration: Any, name: str, computes: bool) -> tuple[nn.Module, str]:
    """A model on the meta device, which takes no memory, and what to say of the one that is used."""
    import torch

    with torch.device("meta"):
        model = make(copy.deepcopy(configuration))
    size = sum(tensor.numel() * tensor.element_size() for tensor in {*model.parameters(), *model.buffers()})
    if not computes:
        return model, f"hf:{name} is made without weights ({amount(size, 'B')}), because nothing is computed"
    free = _free_memory()
    if free is not None and size > free:
        raise GraftError(
            f"the weights of hf:{name} take {amount(size, 'B')}, and {amount(free, 'B')} of memory are free\n"
            "leave --full out; or use `graft summary --full`, which needs no weights"
        )
    return model, f"hf:{name} has {_parameters(model):,} parameters, random ones, of {amount(size, 'B')}"


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _free_memory() -> int | None:
    """Bytes that can still be used, where the operating system says so."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Errors of a library, which may be anything, as one of ours."""
    try:
        yield
    except GraftError:
        raise
    except Exception as error:
        raise GraftError(f"{what}: {one_line(error)}") from error


def _architecture(transformers: ModuleType, name: str) -> tuple[list[Factory], Any]:
    """How to make the model, the likeliest way first, and its usual configuration: by the type of a configuration, or by the name
    of a class."""
    found = getattr(transformers, name, None)
    if found is not None and hasattr(found, "config_class") and found.config_class is not None:
        return [found], found.config_class()
    auto = _part_of_transformers("configuration_auto")
    if name not in auto.CONFIG_MAPPING:
        _unknown("transformers", name, auto.CONFIG_MAPPING.keys())
    configuration = transformers.AutoConfig.for_model(name)
    factories = [transformers.AutoModelForCausalLM, transformers.AutoModel]
    if getattr(configuration, "is_encoder_decoder", False):
        factories.reverse()  # the language model of an encoder with a decoder is its decoder alone
    known = [factory.from_config for factory in factories if type(configuration) in factory._model_mapping]
    if not known:
        raise GraftError(
            f"transformers has a configuration {name!r} and no model for it\nname a class, such as hf:BertModel"
        )
    return known, configuration


def _part_of_transformers(name: str) -> ModuleType:
    _imported("transformers")
    return importlib.import_module(f"transformers.models.auto.{name}")


LIBRARIES: dict[str, Callable[[str, bool, bool], LoadedModel]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "hf": _transformers,
}
