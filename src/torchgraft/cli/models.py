"""The MODEL and --input arguments of commands: from their texts to a module and the tensors to call it with.
Torch is imported only when a command has started; what is done with the model is up to the command.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torchgraft.cli.input_options import check_inputs_fit
from torchgraft.errors import GraftError, one_line
from torchgraft.results.progress import stage

if TYPE_CHECKING:
    from torch import Tensor, nn

WRONG_USAGE = 2

FORMS = (
    "zoo:NAME, torchvision:NAME, timm:NAME, hf:NAME, PACKAGE.MODULE:FACTORY, PATH/FILE.py:FACTORY, FILE.pt2 or FILE.pt"
)
_DEFAULT_BOUND = 10
_INPUT = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)[=:])?(?P<shape>\d+(?:x\d+)*|scalar)(?::(?P<dtype>\w+))?(?::(?P<bound>\d+))?"
)


class ChosenModel(NamedTuple):
    """A model from the command line; `args` is None where neither the user nor the model's family gives inputs."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]

    @property
    def has_inputs(self) -> bool:
        """Whether there is something to run the model on."""
        return self.args is not None or bool(self.kwargs)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --input, --train and --full."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"{FORMS} (a factory is a function that returns a module, or a module; `graft models` lists names)",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SPEC",
        help="an example input such as 2x3x64x64:float32, 2x16:int64:1000 (integers below 1000), scalar:bool, or "
        "ids:1x16:int64 to pass it by name; once for each input (default: guessed for zoo, torchvision, timm and hf models, "
        "and those saved in a .pt2 file)",
    )
    parser.add_argument("--train", action="store_true", help="in training mode (default: evaluation mode)")
    parser.add_argument(
        "--full",
        action="store_true",
        help="hf models at their real size (default: a small configuration of the same kind); weights, which are random, "
        "are only made where the model runs",
    )


def chosen_model(arguments: argparse.Namespace, text: str | None = None, computes: bool = True) -> ChosenModel:
    """The model and inputs that the command line names; `text` is another model of it.

    Where the command `computes` nothing, models at their real size have no weights. A mistake ends the command with one line, as
    argparse does.
    """
    text = text or arguments.model
    try:
        with stage(f"making {text}"):
            return _chosen(arguments, text, computes)
    except GraftError as error:
        wrong_usage(arguments, error)


def wrong_usage(arguments: argparse.Namespace, error: GraftError | str) -> NoReturn:
    """End the command with one line and the code of wrong usage."""
    if getattr(arguments, "traceback", False) and isinstance(error, GraftError):
        raise error
    print(f"{arguments.prog}: {'; '.join(line.strip() for line in str(error).splitlines())}", file=sys.stderr)
    raise SystemExit(WRONG_USAGE) from (error if isinstance(error, GraftError) else None)


def _chosen(arguments: argparse.Namespace, text: str, computes: bool) -> ChosenModel:
    import torch

    given = read_inputs(arguments.input) if arguments.input else None
    torch.manual_seed(0)  # weights are random, and the same every time
    model, inputs, note = load_model(text, getattr(arguments, "full", False), computes)
    if note:
        print(f"{arguments.prog}: {note}", file=sys.stderr)
    args, kwargs = given or inputs or (None, {})
    if given is not None:
        check_inputs_fit(model, *given)
    if not text.endswith(".pt2"):
        model.train(arguments.train)
    elif arguments.train:
        raise GraftError("an exported program stays in the mode it was exported in\nleave --train out")
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        from torch.utils._pytree import tree_map_only

        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    return ChosenModel(text, model, args, kwargs)


# ---- models ----


class LoadedModel(NamedTuple):
    """A module, the inputs that are known for it, by place and by name, and what is to be said about it."""

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None
    note: str = ""


def load_model(text: str, full: bool = False, computes: bool = True) -> LoadedModel:
    """The module that a text names. Where nothing is computed and it is large, it has no weights.

    >>> model, (args, kwargs), note = load_model("zoo:mlp")
    >>> type(model).__name__, [tuple(tensor.shape) for tensor in args]
    ('MLP', [(1, 16)])
    """
    if text.endswith(".pt2"):
        from torchgraft.bridge.torch_export import load_exported

        program, args, kwargs = load_exported(text)
        return LoadedModel(program, (args, kwargs) if args or kwargs else None)
    if text.endswith((".pt", ".pth")):
        return LoadedModel(_module_from_pickle(text), None)
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        _no_place(text)
    if place == "zoo":
        from torchgraft import zoo

        return LoadedModel(zoo.create(name), (zoo.example_inputs(name), {}))
    from torchgraft.cli.libraries import LIBRARIES, library_model

    if place in LIBRARIES:
        return library_model(place, name, full, computes)
    return LoadedModel(_module_of(load_object(text), text), None)


def load_object(text: str) -> Any:
    """What a text of the form PATH/FILE.py:NAME or PACKAGE.MODULE:NAME names."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise GraftError(f"cannot read {text!r}: it does not say where it is from\nwrite PATH/FILE.py:NAME")
    holder = _module_from_file(place) if place.endswith(".py") else _module_by_name(place)
    value: Any = holder
    for part in name.split("."):
        if not hasattr(value, part):
            raise GraftError(f"no {name!r} in {place}; it has {_public_names(holder)}")
        value = getattr(value, part)
    return value


def _no_place(text: str) -> NoReturn:
    """Say what a text that is only a name may have meant."""
    from torchgraft.cli.libraries import closest_names

    what = f"cannot read the model {text!r}: it does not say where the model is from"
    if text.rstrip(":").endswith(".py") and os.path.isfile(text.rstrip(":")):
        text = text.rstrip(":")
        raise GraftError(
            f"{text} is a file with {_public_names(_module_from_file(text))}\nwrite {text}:NAME, with one of these"
        )
    close = closest_names(text.strip(":"))
    if close:
        raise GraftError(f"{what}\ndid you mean {' or '.join(close)}? `graft models` lists all")
    raise GraftError(f"{what}\nwrite {FORMS}; `graft models` lists names")


def _module_from_pickle(path: str) -> nn.Module:
    import torch

    if not os.path.isfile(path):
        raise GraftError(f"no file {path!r}\nwrite {FORMS}")
    try:
        value = torch.load(path, weights_only=False)
    except Exception as error:  # unpickling runs code, and a file may hold anything
        raise GraftError(f"cannot load {path}: {one_line(error)}\ngive a file that torch.save(model) wrote") from error
    if not isinstance(value, torch.nn.Module):
        raise GraftError(
            f"{path} holds an object of class {type(value).__name__}, not a module\nsave the model itself, not its state_dict"
        )
    return value


def _module_of(value: Any, text: str) -> nn.Module:
    from torch import nn

    if isinstance(value, nn.Module):
        return value
    if not callable(value):
        raise GraftError(f"{text} is of type {type(value).__name__}, not a module or a function that returns one")
    try:
        result = value()
    except Exception as error:  # the factory is the user's own, and may raise anything
        raise GraftError(f"calling {text} without arguments raised {one_line(error)}") from error
    if not isinstance(result, nn.Module):
        raise GraftError(f"{text} returned a {type(result).__name__}, not a module\nname a function that returns one")
    return result


def _module_by_name(name: str) -> ModuleType:
    # The command's own folder is on Python's path, the current one is not.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:  # importing runs code of the user's own
        _cannot_import(name, error)


def _module_from_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise GraftError(f"no file {path!r}\nwrite {FORMS}")
    folder, file_name = os.path.split(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file_name.removesuffix(".py")
    if name in sys.modules:  # a file may have the name of a module that somebody else needs
        name = f"_{name}_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # importing runs code of the user's own
        sys.modules.pop(name, None)
        _cannot_import(path, error)
    return module


def _cannot_import(place: str, error: Exception) -> NoReturn:
    raise GraftError(f"cannot import {place}: {one_line(error)}\nwrite {FORMS}") from error


def _public_names(module: ModuleType) -> str:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return ", ".join(name for name in own if not name.startswith("_")) or "no functions or classes of its own"


# ---- inputs ----


def read_inputs(texts: list[str]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Tensors for the texts of --input: those without a name in order, and the others by name. Same values every time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for text in texts:
        match = _INPUT.fullmatch(text)
        if match is None:
            raise GraftError(
                f"cannot read the input {text!r}\nwrite sizes, dtype and, for integers, a bound, such as 2x3x64x64:float32, "
                "2x16:int64:1000, scalar:bool or ids:2x16:int64"
            )
        tensor = _input_tensor(text, match, generator)
        if match["name"]:
            kwargs[match["name"]] = tensor
        else:
            args.append(tensor)
    return tuple(args), kwargs


def _input_tensor(text: str, match: re.Match[str], generator: Any) -> Tensor:
    import torch

    dtype = getattr(torch, match["dtype"] or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise GraftError(
            f"cannot read the input {text!r}: torch has no dtype {match['dtype']!r}\nwrite one such as float32"
        )
    shape = () if match["shape"] == "scalar" else tuple(map(int, match["shape"].split("x")))
    if dtype.is_floating_point or dtype.is_complex:
        if match["bound"]:
            raise GraftError(f"cannot read the input {text!r}: only integers have a bound, and {dtype} is none")
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    bound = 2 if dtype is torch.bool else int(match["bound"] or _DEFAULT_BOUND)
    if bound < 1:
        raise GraftError(f"cannot read the input {text!r}: no integer is below the bound 0 and not negative")
    return torch.randint(0, bound, shape, generator=generator).to(dtype)
