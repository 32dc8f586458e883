"""A machine as the text of a TOML file, as readable as one written by hand.
What is read from such files is in `machine.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from torchgraft.analysis.simulate.machine import Machine


def machine_text(machine: Machine, note: str = "") -> str:
    """The TOML text of a machine; `note` says where the figures of kernels and host come from.

    >>> from torchgraft.analysis.simulate import machine as machines
    >>> h200 = Machine.named("h200")
    >>> machines._parsed(machine_text(h200), "h200.toml").kernels == h200.kernels
    True
    """
    device: dict[str, float] = {"units": machine.units, "memory_bytes": machine.memory_bytes}
    if machine.watts is not None:
        device |= {"watts": machine.watts, "idle_watts": machine.idle_watts or 0.0}
    memory: dict[str, float] = {
        "bandwidth": machine.bandwidth,
        "cache_bytes": machine.cache_bytes,
        "cache_bandwidth": machine.cache_bandwidth,
    }
    optional = ("latency", "fresh_bandwidth", "mapped_bytes", "workspace_bytes")
    memory |= {name: getattr(machine, name) for name in optional if getattr(machine, name)}
    lines = [
        f"{name} = {json.dumps(getattr(machine, name), ensure_ascii=False)}" for name in ("name", "kind", "source")
    ]
    tables = {"device": device, "peak": machine.peak, "memory": memory, "links": machine.links}
    for name, table in tables.items():
        lines += _table(name, table)
    if note:
        lines += ["", *[f"# {line}" for line in note.splitlines()]]
    for kind in sorted(machine.kernels):
        lines += _table(f"kernels.{kind}", machine.kernels[kind])
    return "\n".join([*lines, *_table("host", machine.host)]) + "\n"


def _table(name: str, figures: Mapping[str, float]) -> list[str]:
    return ["", f"[{name}]", *[f"{key} = {_number(value)}" for key, value in figures.items()]] if figures else []


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"
