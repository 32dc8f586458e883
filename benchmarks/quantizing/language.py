"""The command `python -m benchmarks.quantizing.language`: Llamas with integer weights beside bfloat16 and torchao, one token at a
time and a prompt of 32: tokens a second, bytes of the weights, SQNR. It wants transformers, and torchao where that is measured.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.coverage.torchvision_models import import_torchvision
from torchgraft.quantize import quantize

SIZES = {
    "2 layers": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "vocab_size": 32000},
    "1 billion": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantizing.language", description=__doc__)
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--programs", nargs="*", help="the start of the names of those to measure (default: all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        rows += measure(size, options.seconds, tuple(options.programs or [""]))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def llama(size: str) -> Any:
    """A Llama with random weights."""
    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, **SIZES[size])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    return model


def measure(size: str, seconds: float, chosen: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every program of one model, each beside bfloat16."""
    model = llama(size)
    rows = []
    for name, make in programs(model).items():
        if not name.startswith(chosen):
            continue
        for length in (1, 32):
            ids = torch.randint(0, 32000, (1, length), generator=torch.Generator().manual_seed(length))
            try:
                rows.append(one(size, name, model, make(ids), ids, seconds))
            except Exception as error:  # one that fails shall not hide the others
                print(f"{size:10} {name:16} fails: {type(error).__name__}: {str(error)[:120]}", flush=True)
            gc.collect()
    return rows


def one(size: str, name: str, model: Any, program: Any, ids: torch.Tensor, seconds: float) -> dict[str, Any]:
    """One program on one input."""
    length = ids.shape[1]
    with torch.no_grad():
        exact, found = model(input_ids=ids).logits.float(), program(input_ids=ids).logits.float()
        noise = float(10 * torch.log10((exact**2).sum() / ((exact - found) ** 2).sum()))
        times = alternating([lambda: model(input_ids=ids), lambda: program(input_ids=ids)], seconds)
    row = {"size": size, "program": name, "length": length, "bytes": bytes_of(program), "sqnr": noise}
    row |= {"tokens_per_second": length / times[1], "times_bf16": times[0] / times[1]}
    figures = f"{row['tokens_per_second']:8.1f} tokens/s  {row['times_bf16']:5.2f}x bf16"
    print(f"{size:10} {name:16} {length:3} tokens  {figures}  {row['bytes'] / 1e9:.2f} GB  {noise:.1f} dB", flush=True)
    return row


def programs(model: Any) -> dict[str, Callable[[torch.Tensor], Any]]:
    """How each program is made for inputs of a length: ours is captured with them."""

    def of_torchao(kind: str) -> Any:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig  # its only one for a CPU
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        copied = copy.deepcopy(model)
        if kind == "int8":
            quantize_(copied, Int8WeightOnlyConfig())
        else:
            quantize_(copied, PrototypeInt4WeightOnlyConfig(group_size=32))
        return copied

    return {
        "ours int8": lambda ids: quantize(model, [{"input_ids": ids}], config="weight-int8"),
        "ours int4": lambda ids: quantize(model, [{"input_ids": ids}], config="weight-int4"),
        "torchao int8": lambda ids: of_torchao("int8"),
        "torchao int4": lambda ids: of_torchao("int4"),
        "torchao int8 compiled": lambda ids: torch.compile(of_torchao("int8")),
        "torchao int4 compiled": lambda ids: torch.compile(of_torchao("int4")),
    }


def alternating(calls: list[Callable[[], Any]], seconds: float) -> list[float]:
    """The lower eighth of the times of each call, in turn."""
    for call in calls:
        call()
        call()
    times: list[list[float]] = [[] for _ in calls]
    ends = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < ends:
        for place, call in enumerate(calls):
            started = time.perf_counter()
            call()
            times[place].append(time.perf_counter() - started)
    return [sorted(found)[len(found) // 8] for found in times]


def bytes_of(program: Any) -> int:
    """The bytes of all tensors of a program, each once."""
    total, seen = 0, set()
    for tensor in [*program.parameters(), *program.buffers()]:
        for part in _parts(tensor):
            if part.data_ptr() not in seen:
                seen.add(part.data_ptr())
                total += part.numel() * part.element_size()
    return total


def _parts(tensor: Any) -> list[torch.Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]
    return [tensor]


if __name__ == "__main__":
    sys.exit(main())
