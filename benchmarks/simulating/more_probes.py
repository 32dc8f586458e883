"""Further probes on a GPU, where the first ones were too few: `python -m benchmarks.simulating.more_probes OUT`.
It also profiles the models that took part in fitting, kernel by kernel.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.simulating.measure_gpu import Log, profile_probes
from benchmarks.simulating.models import CASES, call_of
from torchgraft.analysis.simulate.calibration.measuring import measure_on_gpu, tf32_allowed
from torchgraft.analysis.simulate.calibration.probes import Draw, Probe
from torchgraft.analysis.simulate.kernels import DTYPES


def chosen() -> list[Probe]:
    draw, found = Draw(seed=7), []

    def add(probe: Probe, *precisions: str) -> None:
        found.extend(Probe(probe.work, probe.shapes, precision, probe.options) for precision in precisions)

    for _ in range(70):  # large convolutions in fp32, where libraries change algorithms
        inner, outer, side = draw.one_of(64, 96, 128, 256, 384, 512), draw.one_of(64, 128, 256, 512), draw.one_of(7, 14, 28, 56)
        kernel, batch = draw.one_of(1, 3, 3, 3, 5), draw.one_of(1, 16, 64, 128)
        shapes = ((batch, inner, side, side), (outer, inner, kernel, kernel))
        add(Probe("convolution", shapes, options={"padding": kernel // 2, "stride": draw.one_of(1, 1, 1, 2)}), "fp32", "tf32", "fp16")
    for _ in range(40):  # channels together in memory
        channels, side, batch = draw.one_of(64, 96, 128, 192, 384, 768), draw.one_of(7, 14, 28, 56), draw.one_of(1, 16, 128)
        grouped = draw.one_of(True, True, False)
        kernel = draw.one_of(3, 7) if grouped else draw.one_of(1, 2, 3)
        shapes = ((batch, channels, side, side), (channels, 1 if grouped else channels, kernel, kernel))
        options = {"padding": kernel // 2, "groups": channels if grouped else 1, "channels_last": True}
        add(Probe("convolution", shapes, options=options), "fp32", "tf32", "fp16")
    for _ in range(40):  # transposed ones, also small
        inner, outer, side = draw.one_of(64, 100, 128, 256, 512, 1024), draw.one_of(3, 64, 128, 256, 512), draw.one_of(1, 4, 8, 16, 32)
        kernel, stride, padding = draw.one_of((4, 2, 1), (4, 1, 0), (2, 2, 0), (3, 2, 1))
        shapes = ((draw.one_of(1, 16, 128), inner, side, side), (inner, outer, kernel, kernel))
        add(Probe("convolution", shapes, options={"stride": stride, "padding": padding, "transposed": True}), "fp32", "tf32", "fp16")
    for _ in range(60):  # products with few rows
        width = (384, 512, 768, 1024, 2048, 2304, 3072, 4096)
        rows, columns, depth = draw.one_of(16, 49, 77, 128, 196, 197, 256, 512), draw.one_of(*width), draw.one_of(*width)
        add(Probe("linear", ((rows, depth), (columns, depth), (columns,))), "fp32", "tf32", "fp16")
    for _ in range(30):
        shape = (draw.batch(), draw.one_of(12, 49, 64, 197), draw.one_of(3, 12, 16, 64), draw.one_of(32, 64))
        add(Probe("transpose_copy", (shape,)), "fp32", "fp16")
    for _ in range(40):
        add(draw.attention(), "fp32", "fp16")
    for _ in range(16):
        add(draw.recurrent(), "fp32", "tf32", "fp16")
    for _ in range(30):
        add(draw.grouped(), "fp32", "tf32", "fp16")
    return found


def profile_models(log: Log) -> None:
    from torch.profiler import ProfilerActivity, profile

    for case in CASES:
        if not case.fit:
            continue
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = case.build().eval().requires_grad_(False)
        for batch, precision in ((1, "fp32"), (16, "fp32"), (1, "tf32"), (16, "tf32"), (1, "fp16"), (16, "fp16"), (128, "fp16")):
            model = model.to(DTYPES[precision])
            args, kwargs = call_of(case, batch, DTYPES[precision], "cuda")
            with torch.no_grad(), tf32_allowed(precision == "tf32"):
                for _ in range(2):
                    model(*args, **kwargs)
                torch.cuda.synchronize()
                with profile(activities=[ProfilerActivity.CUDA]) as found:
                    model(*args, **kwargs)
                    torch.cuda.synchronize()
            events = sorted((event for event in found.events() if str(event.device_type).endswith("CUDA")), key=lambda e: e.time_range.start)
            kernels = [[event.name[:120], round(event.time_range.end - event.time_range.start, 2)] for event in events]
            log.add({"model": case.name, "batch": batch, "precision": precision, "kernels": kernels})
        del model
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    out = Path(sys.argv[1])
    begin = time.perf_counter()
    try:
        profile_models(Log(out / "model_kernels.jsonl"))
    except Exception as error:
        print("profiles:", type(error).__name__, error)
    print(f"profiles after {time.perf_counter() - begin:.0f} s", flush=True)
    log, done = Log(out / "probes2.jsonl"), []
    for probe in chosen():
        if time.perf_counter() - begin > float(sys.argv[2]):
            break
        try:
            log.add(measure_on_gpu(probe).to_dict())
            done.append(probe)
        except Exception as error:
            log.add({"probe": probe.to_dict(), "error": f"{type(error).__name__}: {error}"[:200]})
    print(f"{len(done)} probes after {time.perf_counter() - begin:.0f} s", json.dumps({}), flush=True)
    profile_probes(Log(out / "profile2.jsonl"), done, 20)


if __name__ == "__main__":
    main()
