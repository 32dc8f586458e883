"""Models too large to hold: an 8-billion-parameter Llama on the meta device, and the memory its capture takes.
Nothing is compared with eager here but shapes, because nothing is calculated.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchgraft
from benchmarks.coverage.cases import Case, Inputs
from benchmarks.coverage.comparison import difference
from benchmarks.coverage.rows import EQUAL, WRONG, Attempt, Row
from benchmarks.coverage.torchvision_models import import_torchvision

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
LENGTH = 2048


def cases() -> Iterator[Case]:
    yield Case("large", "Llama 8B", partial(_llama, LLAMA_8B), _words, {})


def _llama(settings: dict[str, Any]) -> nn.Module:
    import_torchvision()
    import transformers

    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()


def _words() -> Inputs:
    return Inputs((torch.zeros(1, LENGTH, dtype=torch.int64, device="meta"),))


def measure(case: Case, report: Callable[[Row], None]) -> None:
    """Capture a model once, and report the seconds and the most memory that took."""
    row = Row(case.collection, case.name)
    model, example = case.build(), case.example()
    row.parameters = sum(parameter.numel() for parameter in model.parameters())
    before = _reset_peak()
    started = time.process_time()
    program = torchgraft.capture(model, example.args, example.kwargs)
    seconds = time.process_time() - started
    row.peak_bytes = _status("VmHWM") - before
    attempt = row.attempts["capture"] = Attempt(True, len(program.graph.nodes), len(program.guards), seconds)
    text = difference(model(*example.args), program(*example.args))
    attempt.verdicts["example"] = WRONG if text else EQUAL
    if text:
        attempt.reasons["example"] = text
    report(row)


def _reset_peak() -> int:
    """Begin a new count of the most memory the process holds, and return what it holds now (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status says nothing of {name}")
    return int(found[1]) * 1024
