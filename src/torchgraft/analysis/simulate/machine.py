"""Machines as data: what one can do at best, how close kernels of each kind come, and what its host takes; as TOML files.
How a time follows from these figures is in `timing.py`, how they are measured in `calibration/`.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from torchgraft.errors import GraftError
from torchgraft.ir.modules import paths_around

# Every figure that a machine's file has to hold, by its table; all are positive. What is written once for each type or kind of
# kernel is checked where it is asked for. A file that says `like = "h200"` has kernels and host of that machine where it says
# nothing itself, with what they do in a second (not shares, not floors) multiplied by its `like_rates`.
REQUIRED = {
    "": ("name", "kind", "source"),
    "device": ("units", "memory_bytes"),
    "memory": ("bandwidth", "cache_bytes", "cache_bandwidth"),
    "peak": (),
    "kernels": (),
    "host": (),
}
# Those that may be left out, and which figures are whole numbers.
OPTIONAL = {
    "device": ("watts", "idle_watts"),
    "memory": ("latency", "fresh_bandwidth", "mapped_bytes", "workspace_bytes"),
}
WHOLE = ("units", "memory_bytes", "cache_bytes", "mapped_bytes", "workspace_bytes")
INHERITED = ("kernels", "host")
RATES = ("flops", "elements", "rows")
# What a table of kernels has to hold, besides `floor`, on a GPU: by the longest beginning of its name. What divides is not 0.
NEEDED = {
    "matmul": ("rate", "half", "step"),
    "matmul.vector": (),
    "convolution": ("rate", "half", "step"),
    "convolution.depthwise": ("flops",),
    "convolution.reorder": ("bandwidth", "elements"),
    "attention": ("rate", "step"),
    "recurrent": ("bandwidth", "step", "each"),
}
DIVISORS = (*RATES, "row_elements", "bandwidth", "rate", "near", "far", "packed")
KINDS = ("gpu", "cpu")
TWINS = {"bf16": "fp16", "fp16": "bf16", "fp8": "fp16", "int8": "fp16", "tf32": "fp32", "fp64": "fp32"}
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")


@dataclass(frozen=True)
class Machine:
    """One machine. `peak` has FLOP/s by precision, `kernels` figures of each kind of kernel, `host` seconds of what Python and
    torch do, `links` bytes a second in one direction to others, `workspace_bytes` what torch keeps
    for products. Seconds, bytes and FLOP/s throughout.

    >>> h200 = Machine.named("h200")
    >>> h200.name, h200.units, f"{h200.bandwidth:.2e}"
    ('NVIDIA H200', 132, '4.80e+12')
    """

    name: str
    kind: str
    source: str
    units: int
    memory_bytes: int
    bandwidth: float
    cache_bytes: int
    cache_bandwidth: float
    peak: Mapping[str, float]
    kernels: Mapping[str, Mapping[str, float]]
    host: Mapping[str, float]
    latency: float = 0.0
    fresh_bandwidth: float = 0.0
    mapped_bytes: int = 0
    workspace_bytes: int = 0
    links: Mapping[str, float] = field(default_factory=dict)
    watts: float | None = None
    idle_watts: float | None = None
    file: str = ""

    @staticmethod
    def named(machine: str | PathLike[str] | Machine) -> Machine:
        """A machine by the name of one that comes with torchgraft, by the path of a TOML file, or as it is.

        The first words of a name are enough where no other begins with them.

        >>> Machine.named("a100").name
        'NVIDIA A100 SXM 80 GB'
        """
        if isinstance(machine, Machine):
            return machine
        text = str(machine)
        path = Path(text)
        if path.suffix == ".toml" or "/" in text:
            return Machine.read(path)
        names = [name for name in machine_names() if name == text or name.startswith(f"{text}_")]
        if text not in names and len(names) != 1:
            raise GraftError(
                f"there is no machine named {text!r}\n"
                f"choose one of {', '.join(machine_names())}, or give the path of a .toml file (graft calibrate writes one)"
            )
        return _own(text if text in names else names[0])

    @staticmethod
    def read(path: str | PathLike[str]) -> Machine:
        """A machine from a TOML file; what is missing or wrong in it is named with its line."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise GraftError(f"the machine file '{path}' is no TOML: it is not text in UTF-8") from None
        except OSError as error:
            raise GraftError(f"cannot read the machine file '{path}': {error.strerror or error}") from error
        return _parsed(text, str(path))

    @property
    def precisions(self) -> tuple[str, ...]:
        """The types of numbers that it can compute with."""
        return tuple(self.peak)

    def table(self, *names: str) -> Mapping[str, float] | None:
        """The figures under the first of some names that there are any for: `"convolution.few.fp16"`, `"convolution.fp16"`."""
        return next((self.kernels[name] for name in names if name in self.kernels), None)

    def figures(self, kind: str, variant: str = "", type: str = "") -> Mapping[str, float]:
        """The figures of a kind of kernel: of this variant and type, of the variant, of the kind, or of element-wise kernels.

        A type without figures of its own has those of its twin: what is as wide runs in the same way.
        """
        variants = [variant, TWINS[variant]] if variant in TWINS else [variant, variant.rpartition("-")[0]]
        types = [type, TWINS.get(type, "")]
        names = [f"{kind}.{one}.{two}" for one in variants for two in types] + [f"{kind}.{one}" for one in variants]
        others = (
            [] if self.kind == "gpu" and kind in NEEDED else ["elementwise"]
        )  # nothing else says what products take
        found = self.table(*names, kind, *others)
        if found is None:
            raise GraftError(
                f"the machine {self.name} has no figures for kernels of the kind '{kind}'\n"
                f"  in {self.file or 'its data'}: write a table [kernels.{kind}]"
                + (", or at least [kernels.elementwise]" if others else "")
            )
        return found


def machine_names() -> tuple[str, ...]:
    """The machines that come with torchgraft.

    >>> "h200" in machine_names()
    True
    """
    return tuple(sorted(entry.name[:-5] for entry in _folder().iterdir() if entry.name.endswith(".toml")))


def _own(name: str) -> Machine:
    return _parsed((_folder() / f"{name}.toml").read_text(), f"{name}.toml")


def _folder() -> Any:
    return resources.files("torchgraft.analysis.simulate") / "machines"


# ---- reading ----


def _parsed(text: str, file: str) -> Machine:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise GraftError(f"the machine file '{file}' is no TOML: {error}") from None
    check = _Check(text, file)
    check.all(data)
    kernels, host = _flattened(data.get("kernels", {})), _numbers(data.get("host", {}))
    if "like" in data:
        other = check.other(data)
        rates = float(data.get("like_rates", 1.0))
        kernels = {kind: scaled(figures, rates, RATES) for kind, figures in other.kernels.items()} | kernels
        host = {**other.host, **host}
    figures: dict[str, Any] = {
        name: int(data[table][name]) if name in WHOLE else float(data[table][name])
        for table, names in OPTIONAL.items()
        for name in (*REQUIRED[table], *names)
        if name in data[table]
    }
    texts = {name: data[name] for name in REQUIRED[""]}
    peak, links = _numbers(data["peak"]), _numbers(data.get("links", {}))
    return Machine(**texts, **figures, peak=peak, kernels=kernels, host=host, links=links, file=file)


def scaled(figures: Mapping[str, float], factor: float, names: Collection[str]) -> dict[str, float]:
    """The figures of a kind of kernel with those of these names multiplied."""
    return {name: value * factor if name in names else value for name, value in figures.items()}


def _numbers(table: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in table.items() if isinstance(value, (int, float))}


def _flattened(tables: Mapping[str, Any], path: str = "") -> dict[str, dict[str, float]]:
    """Tables within tables by their path, `"matmul.fp16"`."""
    found = {}
    for name, table in tables.items():
        if isinstance(table, Mapping):
            if numbers := _numbers(table):
                found[path + name] = numbers
            found |= _flattened(table, f"{path}{name}.")
    return found


class _Check:
    """Finds what is wrong in a machine's file, and the line of it, which `tomllib` does not keep."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.lines: dict[str, int] = {}
        table = ""
        for number, line in enumerate(text.splitlines(), 1):
            if heading := re.match(r"\s*\[([^\]]+)\]", line):
                table = heading[1].strip()
                self.lines.setdefault(table, number)
            elif entry := re.match(r"\s*([A-Za-z0-9_\-\"]+)\s*=", line):
                self.lines[f"{table}.{entry[1].strip(chr(34))}".lstrip(".")] = number

    def all(self, data: Mapping[str, Any]) -> None:
        for table, names in REQUIRED.items():
            if table in INHERITED and "like" in data and table not in data:
                continue
            present = data if not table else data.get(table)
            if not isinstance(present, Mapping):
                self._fail(table, f"the table [{table}] is missing")
            for name in names:
                if name not in present:
                    self._fail(table, f"the figure '{name}' is missing{f' in [{table}]' if table else ''}")
        for name in ("name", "source"):
            if not isinstance(data[name], str):
                self._fail(name, f"{name} is {data[name]!r}; it must be a text")
        if data["kind"] not in KINDS:
            self._fail("kind", f'kind is {data["kind"]!r}; it must be "gpu" or "cpu"')
        if not data["peak"]:
            self._fail("peak", "the table [peak] has no precision")
        for name in data["peak"]:
            if name not in PRECISIONS:
                self._fail(f"peak.{name}", f"the precision '{name}' is not known; write one of {', '.join(PRECISIONS)}")
        for table in ("device", "memory", "peak", "kernels", "host", "links"):
            self._positive(table, data.get(table, {}))
        if data["device"]["units"] != int(data["device"]["units"]):
            self._fail("device.units", f"'device.units' is {data['device']['units']!r}; it must be a whole number")
        for name, figures in _flattened(data.get("kernels", {})).items():
            self._kernels(name, figures, data["kind"])
        rates = data.get("like_rates", 1.0)
        if isinstance(rates, bool) or not isinstance(rates, (int, float)) or not 0 < rates < math.inf:
            self._fail("like_rates", f"'like_rates' is {rates!r}; it must be positive")

    def _kernels(self, name: str, figures: Mapping[str, float], kind: str) -> None:
        needed = next((NEEDED[one] for one in paths_around(name) if one in NEEDED), ()) if kind == "gpu" else ()
        for figure in ("floor", *needed):
            if figure not in figures:
                self._fail(f"kernels.{name}", f"the figure '{figure}' is missing in [kernels.{name}]")
        for figure, value in figures.items():
            if value == 0 and figure in DIVISORS:
                self._fail(f"kernels.{name}.{figure}", f"'kernels.{name}.{figure}' is 0; it must be positive")

    def other(self, data: Mapping[str, Any]) -> Machine:
        """The machine that this one is like: one that comes with torchgraft, of the same kind."""
        name = data["like"]
        if name not in machine_names():
            self._fail(
                "like", f"it is like {name!r}, which does not come with torchgraft ({', '.join(machine_names())} do)"
            )
        other = Machine.named(name)
        if other.kind != data["kind"]:
            self._fail("like", f"it is a {data['kind']} like {name}, which is a {other.kind}")
        return other

    def _positive(self, path: str, table: Mapping[str, Any]) -> None:
        for name, value in table.items():
            where = f"{path}.{name}"
            if isinstance(value, Mapping):
                self._positive(where, value)
            elif name == "source" and isinstance(value, str):
                continue  # of a table
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                self._fail(where, f"'{where}' is {value!r}; it must be a number that is not negative")
            elif value == 0 and path in ("device", "memory", "peak"):
                self._fail(where, f"'{where}' is 0; it must be positive")

    def _fail(self, path: str, what: str) -> NoReturn:
        while path and path not in self.lines:
            path = path.rpartition(".")[0]
        place = f"{self.file}:{self.lines.get(path, 1)}"
        raise GraftError(
            f"the machine file cannot be used: {what}\n  at {place}\n  compare it with one that graft calibrate writes"
        )


# ---- writing ----


def machine_text(machine: Machine, note: str = "") -> str:
    """The TOML text of a machine, as readable as one written by hand; `note` says where figures of kernels and host come from.

    >>> h200 = Machine.named("h200")
    >>> _parsed(machine_text(h200), "h200.toml").kernels == h200.kernels
    True
    """
    lines = [f"{name} = {json.dumps(getattr(machine, name), ensure_ascii=False)}" for name in REQUIRED[""]]
    tables = {
        table: {name: getattr(machine, name) for name in (*REQUIRED[table], *OPTIONAL[table])} for table in OPTIONAL
    }
    for table, figures in {**tables, "peak": machine.peak, "links": machine.links}.items():
        lines += _table(table, {name: value for name, value in figures.items() if value})
    if note:
        lines += ["", *[f"# {line}" for line in note.splitlines()]]
    for kind in sorted(machine.kernels):
        lines += _table(f"kernels.{kind}", machine.kernels[kind])
    return "\n".join([*lines, *_table("host", machine.host)]) + "\n"


def _table(name: str, figures: Mapping[str, float]) -> list[str]:
    return ["", f"[{name}]", *[f"{key} = {_number(value)}" for key, value in figures.items()]] if figures else []


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"
