"""Times and memory of the models of `models.py`, as runs and as steps of training, on a GPU or on the CPU.
Which of them, in what order and for how long is decided in `measure_gpu.py`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.allocations import taken_on_cpu
from benchmarks.simulating.gpu_times import replay_seconds, tf32_allowed
from benchmarks.simulating.log import Log
from benchmarks.simulating.models import Case, call_of
from torchgraft.analysis.simulate.kernels import DTYPES

TRAINED = (
    "resnet50",
    "bert",
    "vit_b_16",
    "convnext_tiny",
    "gpt2",
    "decoder",
    "encoder",
    "unet",
    "mobilenet_v2",
    "vgg16",
)
MOST_SECONDS = 0.25  # for the repetitions of one time


def build(case: Case, device: str) -> nn.Module | None:
    """The model of a case on a device; None, with a line that says so, where a library is missing or does not work."""
    torch.manual_seed(0)
    try:
        try:
            with torch.device(device):
                model = case.build()
        except NotImplementedError:  # a model that reads numbers while it is made cannot be made on meta
            model = case.build()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        print(f"{case.name}: left out, {type(error).__name__}: {reason}", flush=True)
        return None
    return model.to(device)


def free(device: str) -> None:
    """Give back what is not used."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure_runs(
    case: Case, log: Log, batches: tuple[int, ...], precisions: tuple[str, ...], device: str, end: float
) -> None:
    """One model at all batches and precisions that are not there yet."""
    rows = [
        {"model": case.name, "kind": case.kind, "fit": case.fit, "batch": batch, "precision": precision}
        for precision in precisions
        for batch in batches
    ]
    todo = [row for row in rows if not log.has(row)]
    model = build(case, device) if todo else None
    if model is None:
        return
    model.eval().requires_grad_(False)
    for row in _until(todo, end):
        free(device)
        dtype = DTYPES[row["precision"]]
        model = model.to(dtype)
        log.begin(row)

        def measured(model: nn.Module = model, row: dict[str, Any] = row, dtype: torch.dtype = dtype) -> dict[str, Any]:
            args, kwargs = call_of(case, row["batch"], dtype, device)
            with torch.no_grad(), tf32_allowed(row["precision"] == "tf32"):
                run = lambda: model(*args, **kwargs)  # noqa: E731
                return _run_on_gpu(run) if device == "cuda" else _run_on_cpu(run, model, args, kwargs)

        log.add(row | _or_error(measured, device))
        if "lost" in log.rows[-1]:
            return  # nothing that this process measures now would be true
    free(device)


def measure_training(
    case: Case, log: Log, precisions: tuple[str, ...], device: str, end: float, batch: int = 16
) -> None:
    """Whole training steps with AdamW, eager."""
    rows = [{"training": case.name, "kind": case.kind, "batch": batch, "precision": name} for name in precisions]
    todo = [row for row in rows if row["precision"] in ("fp32", "tf32") and not log.has(row)]
    model = build(case, device) if todo else None
    if model is None:
        return
    model.train()
    for row in _until(todo, end):
        free(device)
        log.begin(row)

        def measured(model: nn.Module = model, row: dict[str, Any] = row) -> dict[str, Any]:
            args, kwargs = call_of(case, batch, torch.float32, device)
            with tf32_allowed(row["precision"] == "tf32"):
                return _steps(model, args, kwargs, device)

        log.add(row | _or_error(measured, device))
        if "lost" in log.rows[-1]:
            return  # nothing that this process measures now would be true
        model.zero_grad()
    free(device)


def _until(rows: list[dict[str, Any]], end: float) -> Iterator[dict[str, Any]]:
    for row in rows:
        if time.perf_counter() > end:
            return
        yield row


def _or_error(measured: Callable[[], dict[str, Any]], device: str) -> dict[str, Any]:
    """What was measured, or what went wrong; a device that does not answer afterwards is lost to this process."""
    try:
        return measured()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:400]}
    return found | _lost(device)


def _lost(device: str) -> dict[str, str]:
    """After an error: an entry that says that the device does not answer any more, if that is so."""
    try:
        free(device)
        synchronize(device)
    except Exception:
        return {"lost": "the device did not answer any more"}
    return {}


# ---- runs ----


def _run_on_gpu(run: Callable[[], Any]) -> dict[str, Any]:
    torch._C._cuda_clearCublasWorkspaces()
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"peak_bytes": torch.cuda.max_memory_allocated(), "resident_bytes": resident}
    row["requested_bytes"] = int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    del result
    row["kept_bytes"] = torch.cuda.memory_allocated() - resident  # what libraries keep for later calls
    row |= _times(run, "cuda")
    replays = max(3, min(12, int(MOST_SECONDS / max(row["eager"], 1e-4))))
    try:
        row["graph"] = replay_seconds([run], replays=replays)
    except Exception as error:
        row["graph_error"] = f"{type(error).__name__}: {error}"[:300]
    return row | (_lost("cuda") if "graph_error" in row else {})


def _run_on_cpu(run: Callable[[], Any], model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    run()
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor)
    }
    resident = sum(storages.values())
    return {"peak_bytes": resident + taken_on_cpu(run), "resident_bytes": resident, **_times(run, "cpu")}


def _times(run: Callable[[], Any], device: str) -> dict[str, float]:
    """The median of single runs, each waited for, and the mean of runs in a row."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < MOST_SECONDS and len(times) < 40):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    count = max(3, min(20, int(MOST_SECONDS / min(times))))
    start = time.perf_counter()
    for _ in range(count):
        run()
    synchronize(device)
    return {"eager": statistics.median(times), "eager_in_a_row": (time.perf_counter() - start) / count}


# ---- steps of training ----


def _steps(model: nn.Module, args: Any, kwargs: Any, device: str) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        result = model(*args, **kwargs)
        leaves = pytree.tree_leaves(getattr(result, "to_tuple", lambda: result)())
        leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    synchronize(device)
    row: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(8):
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    if device == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return {"eager": statistics.median(times), **row}
