"""Measures probes and models on a GPU and writes the times as JSON: `python -m benchmarks.simulating.measure_gpu OUT`.
What is simulated is compared with these files by `python -m benchmarks.simulating`, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.simulating.models import BATCHES, CASES, PRECISIONS, Case, call_of
from torchgraft.analysis.simulate.calibration.measuring import (
    host_seconds,
    measure_on_gpu,
    replay_seconds,
    tf32_allowed,
)
from torchgraft.analysis.simulate.calibration.probes import Probe, probes
from torchgraft.analysis.simulate.kernels import DTYPES

COUNTS = {
    "linear": 110, "bmm": 30, "convolution": 230, "grouped": 70, "other_convolution": 50, "attention": 60,
    "recurrent": 14, "elementwise": 60, "norm": 80, "memory": 130, "gradient": 50,
}  # fmt: skip


class Log:
    """Lines of JSON, written as they come."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def add(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()


def measure_probes(log: Log, seconds: float, counts: dict[str, int]) -> list[Probe]:
    """Probes of all kinds in turn, until the time is up."""
    chosen = list(probes(counts, PRECISIONS))
    chosen = [chosen[place] for offset in range(7) for place in range(offset, len(chosen), 7)]  # all kinds soon
    end, done = time.perf_counter() + seconds, []
    for probe in chosen:
        if time.perf_counter() > end:
            print(f"time is up after {len(done)} of {len(chosen)} probes", flush=True)
            break
        try:
            log.add(measure_on_gpu(probe).to_dict())
            done.append(probe)
        except Exception as error:
            log.add({"probe": probe.to_dict(), "error": f"{type(error).__name__}: {error}"[:300]})
    return done


def profile_probes(log: Log, chosen: list[Probe], seconds: float) -> None:
    """The names and times of the kernels of each probe, from torch's profiler; a spinning kernel stands between probes."""
    from torch.profiler import ProfilerActivity, profile

    end = time.perf_counter() + seconds
    for begin in range(0, len(chosen), 150):
        if time.perf_counter() > end:
            return
        part = chosen[begin : begin + 150]
        with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as found:
            for probe in part:
                tensors = probe.tensors("cuda")
                torch.cuda._sleep(100)
                with tf32_allowed(probe.precision == "tf32"):
                    probe.run(tensors)
                    torch.cuda._sleep(100)
                    del tensors
            torch.cuda.synchronize()
        kernels = sorted((event for event in found.events() if str(event.device_type).endswith("CUDA")), key=lambda e: e.time_range.start)
        groups: list[list[Any]] = [[]]
        for event in kernels:
            if "spin" in event.name:
                groups.append([])
            else:
                groups[-1].append([event.name[:160], event.time_range.end - event.time_range.start])
        for place, probe in enumerate(part):
            at = 2 * place + 1
            log.add({"probe": probe.to_dict(), "kernels": groups[at] if at < len(groups) else None})


def host_calls() -> dict[str, Any]:
    """Small calls whose time is that of the host."""
    x, image, words = torch.randn(8, 64, device="cuda"), torch.randn(1, 16, 8, 8, device="cuda"), torch.ones(4, 8, dtype=torch.long, device="cuda")
    wide, heads = torch.randn(2, 8, 64, device="cuda"), torch.randn(2, 4, 8, 16, device="cuda")
    modules: dict[str, tuple[nn.Module, Any]] = {
        "identity": (nn.Identity(), x), "sequential_of_3_identities": (nn.Sequential(*[nn.Identity() for _ in range(3)]), x),
        "linear": (nn.Linear(64, 64), x), "linear_3d": (nn.Linear(64, 64), wide), "linear_no_bias": (nn.Linear(64, 64, bias=False), wide),
        "conv": (nn.Conv2d(16, 16, 3, padding=1, bias=False), image), "conv_bias": (nn.Conv2d(16, 16, 3, padding=1), image),
        "depthwise": (nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), image), "batch_norm": (nn.BatchNorm2d(16), image),
        "layer_norm": (nn.LayerNorm(64), wide), "group_norm": (nn.GroupNorm(4, 16), image), "relu": (nn.ReLU(), x),
        "relu_inplace": (nn.ReLU(True), x.clone()), "gelu": (nn.GELU(), x), "dropout": (nn.Dropout(), x), "embedding": (nn.Embedding(100, 64), words),
        "max_pool": (nn.MaxPool2d(2), image), "adaptive_pool": (nn.AdaptiveAvgPool2d(1), image), "flatten": (nn.Flatten(), image),
        "lstm": (nn.LSTM(64, 64, batch_first=True), wide), "conv_transpose": (nn.ConvTranspose2d(16, 16, 2, 2), image),
        "multihead": (nn.MultiheadAttention(64, 4, batch_first=True), None), "encoder_layer": (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), wide),
    }  # fmt: skip
    calls: dict[str, Any] = {}
    for name, (module, value) in modules.items():
        module = module.cuda().eval()
        calls[f"module {name}"] = (lambda m=module: m(wide, wide, wide)) if value is None else (lambda m=module, v=value: m(v))
    functions: dict[str, Any] = {
        "add": lambda: x + x, "mul_scalar": lambda: x * 2.0, "relu": lambda: torch.relu(x), "view": lambda: x.view(64, 8), "transpose": lambda: wide.transpose(1, 2),
        "reshape": lambda: wide.reshape(16, 64), "slice": lambda: wide[:, 1:], "unsqueeze": lambda: x.unsqueeze(0), "chunk": lambda: x.chunk(2, -1),
        "cat": lambda: torch.cat([x, x], 1), "matmul": lambda: wide @ wide.transpose(1, 2), "softmax": lambda: functional.softmax(wide, -1),
        "sdpa": lambda: functional.scaled_dot_product_attention(heads, heads, heads), "mean": lambda: wide.mean(-1), "linear": lambda: functional.linear(x, x),
        "contiguous": lambda: wide.transpose(1, 2).contiguous(), "to_half": lambda: x.to(torch.float16), "zeros": lambda: torch.zeros(8, device="cuda"),
        "arange": lambda: torch.arange(8, device="cuda"), "index": lambda: x[words[0]], "pad": lambda: functional.pad(image, (1, 1, 1, 1)),
        "where": lambda: torch.where(x > 0, x, x), "interpolate": lambda: functional.interpolate(image, scale_factor=2), "pow_mean_rsqrt": lambda: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        "shape": lambda: x.shape, "python_function": lambda: None, "permute": lambda: image.permute(0, 2, 3, 1), "expand": lambda: x.unsqueeze(0).expand(4, 8, 64), "add_": lambda: x.add_(0.0),
        "std": lambda: x.std(), "split": lambda: x.split(32, -1), "topk": lambda: x.topk(2), "bmm": lambda: torch.bmm(wide, wide.transpose(1, 2)), "masked_fill": lambda: x.masked_fill(x > 0, 0.0),
    }  # fmt: skip
    return calls | {f"function {name}": call for name, call in functions.items()}


def measure_host(log: Log) -> None:
    with torch.no_grad():
        for name, call in host_calls().items():
            try:
                call()
                log.add({"host": name, "seconds": host_seconds(call)})
            except Exception as error:
                log.add({"host": name, "error": f"{type(error).__name__}: {error}"[:300]})


# ---- models ----


def measure_model(case: Case, log: Log, batches: tuple[int, ...], end: float) -> None:
    """One model at all batches and precisions."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = case.build().eval().requires_grad_(False)
    model = model.cuda()
    for precision in PRECISIONS:
        model = model.to(DTYPES[precision])
        for batch in batches:
            if time.perf_counter() > end:
                return
            gc.collect()
            torch.cuda.empty_cache()
            row = {"model": case.name, "kind": case.kind, "fit": case.fit, "batch": batch, "precision": precision}
            try:
                args, kwargs = call_of(case, batch, DTYPES[precision], "cuda")
                with torch.no_grad(), tf32_allowed(precision == "tf32"):
                    row |= _measured(model, args, kwargs)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:400]
                torch.cuda.synchronize()
            log.add(row)


def _measured(model: nn.Module, args: Any, kwargs: Any, most: float = 0.2) -> dict[str, Any]:
    torch._C._cuda_clearCublasWorkspaces()
    for _ in range(2):
        model(*args, **kwargs)
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(*args, **kwargs)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"peak_bytes": torch.cuda.max_memory_allocated(), "resident_bytes": resident}
    row["requested_bytes"] = int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    row["eager"], row["eager_in_a_row"] = _eager(model, args, kwargs, most)
    try:
        row["graph"] = replay_seconds([lambda: model(*args, **kwargs)], replays=max(3, min(12, int(most / max(row["eager"], 1e-4)))))
    except Exception as error:
        row["graph_error"] = f"{type(error).__name__}: {error}"[:300]
        torch.cuda.synchronize()
    return row


def _eager(model: nn.Module, args: Any, kwargs: Any, most: float) -> tuple[float, float]:
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < most and len(times) < 40):
        start = time.perf_counter()
        model(*args, **kwargs)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    count = max(3, min(20, int(most / min(times))))
    start = time.perf_counter()
    for _ in range(count):
        model(*args, **kwargs)
    torch.cuda.synchronize()
    return sorted(times)[len(times) // 2], (time.perf_counter() - start) / count


def measure_training(log: Log, names: tuple[str, ...], end: float) -> None:
    """Whole training steps with AdamW, eager."""
    for case in CASES:
        if case.name not in names or time.perf_counter() > end:
            continue
        with torch.device("cuda"):
            model = case.build().train()
        model = model.cuda()
        for precision in ("fp32", "tf32"):
            row = {"training": case.name, "kind": case.kind, "batch": 16, "precision": precision}
            try:
                args, kwargs = call_of(case, 16, DTYPES[precision], "cuda")
                optimizer = torch.optim.AdamW(model.parameters())
                with tf32_allowed(precision == "tf32"):
                    row |= _training_step(model, args, kwargs, optimizer)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:400]
            log.add(row)
        del model
        gc.collect()
        torch.cuda.empty_cache()


def _training_step(model: nn.Module, args: Any, kwargs: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    def step() -> None:
        result = model(*args, **kwargs)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(getattr(result, "to_tuple", lambda: result)()) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(8):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"eager": sorted(times)[len(times) // 2], "peak_bytes": torch.cuda.max_memory_allocated()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--probe-seconds", type=float, default=110)
    parser.add_argument("--profile-seconds", type=float, default=40)
    parser.add_argument("--model-seconds", type=float, default=300)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--no-models", action="store_true")
    options = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), torch.backends.cudnn.version(), flush=True)
    begin = time.perf_counter()
    if not options.only:
        measure_host(Log(options.out / "host.jsonl"))
        done = measure_probes(Log(options.out / "probes.jsonl"), options.probe_seconds, COUNTS)
        print(f"{len(done)} probes in {time.perf_counter() - begin:.0f} s", flush=True)
        try:
            profile_probes(Log(options.out / "profile.jsonl"), done, options.profile_seconds)
        except Exception:
            traceback.print_exc()
        print(f"profiled after {time.perf_counter() - begin:.0f} s", flush=True)
    if options.no_models:
        return
    log, end = Log(options.out / "models.jsonl"), time.perf_counter() + options.model_seconds
    for case in CASES:
        if time.perf_counter() > end:
            break
        start = time.perf_counter()
        try:
            if not options.only or case.name in options.only:
                measure_model(case, log, BATCHES, end)
        except Exception:
            print(case.name, traceback.format_exc()[-600:], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{case.name} {time.perf_counter() - start:.1f} s, {time.perf_counter() - begin:.0f} s in all", flush=True)
    measure_training(log, ("resnet50", "bert", "vit_b_16", "convnext_tiny", "gpt2", "unet", "mobilenet_v2", "vgg16"), end + 40)


if __name__ == "__main__":
    main()
