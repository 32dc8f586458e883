"""The command `python -m benchmarks.quantizing.memory`: the memory that quantizing a Llama from the shards of a checkpoint takes,
measured in a process of its own. The checkpoint is written first, one shard for each layer; it wants transformers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from torchgraft.quantize import load_weights, quantize

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 1000},
    "1 billion": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    "8 billion": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantizing.memory", description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="1 billion")
    parser.add_argument("--schemes", nargs="*", default=["weight-int8", "weight-int4"])
    parser.add_argument("--folder", help="where the shards are written (default: a temporary folder)")
    parser.add_argument("--measure", metavar="SCHEME", help=argparse.SUPPRESS)  # what the process of its own does
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.size, options.measure, Path(options.folder))))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        size, largest = write_shards(options.size, Path(folder))
        print(
            f"{options.size}: a checkpoint of {size / 1e9:.2f} GB, its largest tensor {largest / 1e9:.2f} GB",
            flush=True,
        )
        for scheme in options.schemes:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.quantizing.memory", "--size", options.size]
            found = subprocess.run(
                [*command, "--measure", scheme, "--folder", folder], stdout=subprocess.PIPE, text=True, check=True
            )
            row = json.loads(found.stdout.splitlines()[-1])
            over = (row["peak"] - row["program"]) / 1e9
            print(
                f"{options.size}: {scheme}: the program {row['program'] / 1e9:.2f} GB, the most in use {row['peak'] / 1e9:.2f} GB"
                f" ({over:.2f} GB more), {row['seconds']:.0f} s; before the first tensor {row['empty'] / 1e9:.2f} GB",
                flush=True,
            )
    return 0


def empty_llama(size: str) -> Any:
    """A Llama of 16-bit floats without data."""
    from benchmarks.coverage.torchvision_models import import_torchvision

    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, use_cache=False, **SIZES[size])
    with torch.device("meta"):
        return LlamaForCausalLM(config).eval().bfloat16()


def write_shards(size: str, folder: Path) -> tuple[int, int]:
    """Write the weights, random ones, layer by layer; the bytes of all and of the largest."""
    import safetensors.torch

    shapes = {name: value.shape for name, value in empty_llama(size).state_dict().items()}
    largest = max(shape.numel() for shape in shapes.values())
    values = torch.randn(largest, dtype=torch.bfloat16).mul_(0.02)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in shapes.items():
        part = parts.setdefault(".".join(name.split(".")[:3]), {})
        part[name] = values[: shape.numel()].reshape(shape)
    for number, part in enumerate(parts.values()):
        # Views of one tensor: each gets memory of its own as it is written.
        safetensors.torch.save_file(
            {name: value.clone() for name, value in part.items()}, folder / f"model-{number:05}.safetensors"
        )
    return 2 * sum(shape.numel() for shape in shapes.values()), 2 * largest


def measure(size: str, scheme: str, folder: Path) -> dict[str, float]:
    """Quantize without data, then fill from the shards; what is in use is watched all the while."""
    started = time.perf_counter()
    model = empty_llama(size)
    with torch.device("meta"):
        # With a mask of its own the model does not look at its inputs, which have no values yet.
        inputs = {
            "input_ids": torch.zeros(1, 8, dtype=torch.long),
            "attention_mask": torch.zeros(1, 1, 8, 8).bfloat16(),
        }
    program = quantize(model, [inputs], config=scheme)
    # What the model computes when it is made is not in the files.
    size_of_head = SIZES[size]["hidden_size"] // 32
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, size_of_head, 2) / size_of_head)
    others = {name: frequencies for name, value in program.named_buffers() if name.endswith("inv_freq")}
    empty = in_use()
    with Watch() as watch:
        load_weights(program, folder, others=others)
    tensors = {value.data_ptr(): value for value in [*program.parameters(), *program.buffers()]}
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    with torch.no_grad():
        given = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in inputs.items()}
        assert torch.isfinite(program(**given).logits).all()
    return {"program": total, "empty": empty, "peak": watch.most - empty, "seconds": time.perf_counter() - started}


class Watch:
    """The most memory in use while a block runs, looked at every few milliseconds."""

    def __enter__(self) -> Watch:
        self.most, self.ends = in_use(), threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def _look(self) -> None:
        while not self.ends.wait(0.002):
            self.most = max(self.most, in_use())

    def __exit__(self, *error: object) -> None:
        self.ends.set()
        self.thread.join()


def in_use() -> int:
    """The bytes that this process holds; pages of files, which the system may drop at any time, are not counted."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not say how much memory is in use (no RssAnon in /proc/self/status)")


if __name__ == "__main__":
    sys.exit(main())
