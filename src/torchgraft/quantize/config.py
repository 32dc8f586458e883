"""One readable value that says which part of a model is quantized how: by module name or pattern, by type, by function.
It is read from and printed as TOML; what the schemes mean is in `schemes.py`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from torchgraft.errors import QuantizeError, suggestion
from torchgraft.ir.modules import paths_around
from torchgraft.quantize.schemes import NAMED, Numbers, Scheme, scheme

BACKENDS = ("native", "reference", "onnxruntime", "openvino", "cuda")
_SWITCHES = ("equalize", "correct_bias", "learn_rounding")


@dataclass(frozen=True)
class Config:
    """Which layers are quantized how. A name wins over a pattern, a pattern over a type, a type over a function;
    what is said of a module holds for the modules in it.

    `modules` goes by the names of `model.named_modules()` or by patterns of them, `types` by classes of modules, `functions` by
    functions as `torch.nn.functional.linear`. `schemes` are schemes of your own, by name.

    >>> config = Config("static-int8", modules={"head": "float", "layers.*.mlp": "dynamic-int8"})
    >>> print(config)
    scheme = "static-int8"
    <BLANKLINE>
    [modules]
    head = "float"
    "layers.*.mlp" = "dynamic-int8"
    >>> Config.from_text(str(config)) == config
    True
    """

    scheme: str = "static-int8"
    modules: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    equalize: bool = False
    correct_bias: bool = False
    learn_rounding: bool = False

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise QuantizeError(f"expected true or false for {name}, got {getattr(self, name)!r}")
        for table in ("modules", "types", "functions", "schemes"):
            if not isinstance(getattr(self, table), Mapping):
                raise QuantizeError(
                    f"expected names and their schemes for {table}, got {getattr(self, table)!r}\n"
                    f'write for example {table}={{"a_name": ...}}'
                )
        for table in ("modules", "types", "functions"):
            given = {text_of(key): value for key, value in getattr(self, table).items()}
            object.__setattr__(self, table, given)
        for name in self.scheme_names:
            scheme(name, dict(self.schemes))

    @property
    def scheme_names(self) -> list[str]:
        """The names of the schemes that layers are given, each once."""
        return list(
            dict.fromkeys((self.scheme, *self.modules.values(), *self.types.values(), *self.functions.values()))
        )

    def scheme_of(self, path: str, kind: type | None, function: Any = None) -> Scheme:
        """The scheme of a layer: the path and class of its module, and the function that computes it."""
        return scheme(self.name_of(path, kind, function), dict(self.schemes))

    def name_of(self, path: str, kind: type | None, function: Any = None) -> str:
        """The name of that scheme."""
        around = paths_around(path)
        for place in around:  # what is said of a module holds for all that is in it
            if place in self.modules:
                return self.modules[place]
        for place in around:
            for pattern, name in self.modules.items():
                if fnmatch.fnmatchcase(place, pattern):
                    return name
        for base in kind.__mro__ if kind is not None else ():
            if (found := self.types.get(text_of(base))) is not None:
                return found
        known = self.functions.get(text_of(function)) if function is not None else None
        return self.scheme if known is None else known

    def with_float(self, paths: Any) -> Config:
        """The same, with these modules kept as they are."""
        return dataclasses.replace(self, modules={**self.modules, **dict.fromkeys(paths, "float")})

    # ---- TOML ----

    @classmethod
    def from_text(cls, text: str) -> Config:
        """The value that a TOML text says."""
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise QuantizeError(f"the configuration is no TOML: {error}\nwrite for example: {_EXAMPLE}") from None
        names = [item.name for item in dataclasses.fields(cls)]
        for key in given:
            if key not in names:
                raise QuantizeError(f"the configuration has no entry {key!r}\n{suggestion(key, names)}")
        own = given.pop("schemes", {})
        if isinstance(own, Mapping):
            own = {name: _scheme_from(name, table) for name, table in own.items()}
        return cls(**given, schemes=own)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Config:
        """The value that a TOML file says."""
        if not Path(path).is_file():
            raise QuantizeError(f"there is no file {str(path)!r}\ngive a TOML file, or the name of a scheme")
        return cls.from_text(Path(path).read_text(encoding="utf-8"))

    def __str__(self) -> str:
        lines = [f"scheme = {_text(self.scheme)}"]
        lines += [f"{name} = true" for name in _SWITCHES if getattr(self, name)]
        for table in ("modules", "types", "functions"):
            entries = getattr(self, table)
            if entries:
                lines += ["", f"[{table}]", *[f"{_key(key)} = {_text(value)}" for key, value in entries.items()]]
        for name, own in self.schemes.items():
            lines += ["", f"[schemes.{_key(name)}]"]
            for item in dataclasses.fields(own):
                value = getattr(own, item.name)
                if value != item.default:
                    lines.append(f"{item.name} = {_value(value)}")
        return "\n".join(lines)


_EXAMPLE = 'scheme = "static-int8"'


def default_config(backend: str = "native") -> Config:
    """What is right for most models on a backend.

    >>> default_config("cuda").scheme
    'dynamic-int8-rows'
    """
    if backend not in BACKENDS:
        raise QuantizeError(f"no backend is called {backend!r}\n{suggestion(backend, BACKENDS)}")
    if backend == "cuda":
        return Config("dynamic-int8-rows")
    # Without VNNI, products of full bytes are added up in 16 bits and may not fit.
    return Config("static-int8" if backend != "native" or has_vnni() else "static-int7")


def has_vnni() -> bool:
    """Whether this machine multiplies bytes into 32 bits."""
    return bool(torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported())


def check_machine(config: Config, backend: str) -> None:
    """Refuse a backend or scheme that this machine has no kernels for."""
    if backend not in ("native", "cuda"):
        return
    has_gpu = torch.cuda.is_available()
    if backend == "cuda" and not has_gpu:
        raise QuantizeError('there is no CUDA device for backend="cuda"\nuse backend="native" or "reference" here')
    for name in config.scheme_names:
        used = scheme(name, dict(config.schemes))
        is_float8 = any(part is not None and part.kind == "float8" for part in (used.weights, used.inputs))
        if is_float8 and not (backend == "cuda" and torch.cuda.get_device_capability() >= (8, 9)):
            possible = [known for known, item in NAMED.items() if item.weights is not None and known != "float8"]
            raise QuantizeError(
                f"this machine has no kernel for the scheme {name!r}, which wants a GPU with 8-bit floats\n"
                f'use backend="reference", which computes the same with ordinary operators, or one of: {", ".join(possible)}'
            )


def as_config(value: Config | str | PathLike[str] | None, backend: str) -> Config:
    """A configuration, however it was given: a `Config`, the name of a scheme, a TOML text or a file."""
    default = default_config(backend)  # which refuses a backend that is not known
    if value is None:
        return default
    if isinstance(value, Config):
        return value
    if isinstance(value, Scheme):
        return Config("own", schemes={"own": value})
    if isinstance(value, PathLike) or (isinstance(value, str) and value.endswith(".toml")):
        return Config.load(value)
    if isinstance(value, str) and ("=" in value or "\n" in value):
        return Config.from_text(value)
    if isinstance(value, str):
        return Config(value)  # which says what schemes there are
    raise QuantizeError(
        f"expected a Config for config, got {type(value).__name__}\n"
        "give a torchgraft.quantize.Config, the name of a scheme, or a TOML file"
    )


def text_of(item: Any) -> str:
    """The path of a class or function, as people write it: torch.nn.Linear, torch.nn.functional.linear."""
    if isinstance(item, str):
        return item
    home, name = getattr(item, "__module__", "") or "", getattr(item, "__qualname__", str(item))
    if home.startswith("torch.nn.modules"):
        home = "torch.nn"
    if home.startswith(("torch._C._nn", "torch._ops.aten")) or home == "torch":
        # The same function goes by several names: torch.conv2d, torch.nn.functional.conv2d, torch.ops.aten.conv2d.default.
        plain = name.removeprefix("_VariableFunctionsClass.").removeprefix("aten::")
        if hasattr(torch.nn.functional, plain):
            home, name = "torch.nn.functional", plain
    return f"{home}.{name}" if home else name


def _scheme_from(name: str, table: Mapping[str, Any]) -> Scheme:
    try:
        given: dict[str, Any] = {
            key: Numbers(**item) if isinstance(item, Mapping) else item for key, item in table.items()
        }
        return Scheme(**given)
    except (TypeError, AttributeError) as error:
        said = str(error).replace(".__init__()", "")
        raise QuantizeError(f"cannot read the scheme {name!r}: {said}") from None


def _key(text: str) -> str:
    return text if text.isascii() and text.replace("_", "").replace("-", "").isalnum() else _text(text)


def _value(value: Any) -> str:
    if isinstance(value, Numbers):
        parts = [
            f"{item.name} = {_value(getattr(value, item.name))}"
            for item in dataclasses.fields(value)
            if getattr(value, item.name) != item.default
        ]
        return f"{{ {', '.join(parts)} }}" if parts else "{}"
    return _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
