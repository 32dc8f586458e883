"""Lowered modules on the CPU beside eager, torch.fx's fusion and each runtime used directly: `python -m benchmarks.lower_cpu`.
Twelve models; those of torchvision and transformers are left out where these are not installed, runtimes likewise.

By default every model at batch 1, ResNet-50 also at batch 16, without torch.compile: a few minutes. `--all` takes both batches
of all of them; `--compile` has torch.compile, too, which takes most of an hour. Each row is a process of its own, which is
ended after `--limit` seconds (with torch.compile it is then taken without); what was found is in `--output` after each row, and
the next run adds to it. `--missing` takes what is not in it yet, within `--budget` seconds; `--markdown` prints all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import logging
import statistics
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchgraft
from benchmarks.coverage.torchvision_models import import_torchvision
from benchmarks.lower_gpu import run_alone
from benchmarks.models import small_mlp
from torchgraft import zoo
from torchgraft.backends.auto import in_turns
from torchgraft.backends.backend import Options, find_backend
from torchgraft.backends.bench import ALONE
from torchgraft.bridge.exporting import exported_model
from torchgraft.codegen.calling import of_batch
from torchgraft.errors import BackendError
from torchgraft.results.files import write_text

Call = Callable[[], Any]
OURS = "lower, auto"
COMPILE = "torch.compile"
IMAGES = {
    "ResNet-50": "resnet50", "MobileNetV3": "mobilenet_v3_large", "EfficientNet": "efficientnet_b0", "ViT": "vit_b_16",
    "Swin": "swin_t", "ConvNeXt": "convnext_tiny",
}  # fmt: skip


class Recurrent(nn.Module):
    """Two layers of LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Logits(nn.Module):
    """A model of transformers that returns a tensor."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False)[self.name] if self.name == "logits" else self.model(ids)[self.name]


def _image(name: str) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    return lambda: (
        getattr(import_torchvision().models, name)(weights=None).eval(),
        (torch.randn(1, 3, 224, 224),),
    )


def _language(kind: str) -> tuple[nn.Module, tuple[Any, ...]]:
    import transformers

    common = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 8000}
    if kind == "BERT":
        model = transformers.BertModel(transformers.BertConfig(intermediate_size=2048, **common))
    elif kind == "GPT-2":
        config = transformers.GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=8000)
        model = transformers.GPT2LMHeadModel(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=1536, **common))
    result = "last_hidden_state" if kind == "BERT" else "logits"
    return Logits(model.eval(), result).eval(), (torch.randint(0, 8000, (1, 64)),)


class Detections(nn.Module):
    """A detection model of transformers that returns classes and boxes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.model(images)
        return found.logits, found.pred_boxes


def _yolos() -> tuple[nn.Module, tuple[Any, ...]]:
    """YOLOS in its tiny size: no candidate boxes to sort, so that every runtime can take it whole."""
    import transformers

    sizes = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": [320, 320]}
    model = transformers.YolosForObjectDetection(transformers.YolosConfig(**sizes)).eval()
    return Detections(model).eval(), (torch.randn(1, 3, 320, 320),)


def _detection() -> tuple[nn.Module, tuple[Any, ...]]:
    model = import_torchvision().models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    return model.eval(), ([torch.rand(3, 320, 320)],)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "MLP of 12 modules": lambda: (small_mlp(), (torch.randn(1, 16),)),
    **{title: _image(name) for title, name in IMAGES.items()},
    **{kind: (lambda kind=kind: _language(kind)) for kind in ("BERT", "GPT-2", "Llama")},  # type: ignore[misc]
    "DeepRecommender": lambda: (zoo.create("deep_recommender").eval(), zoo.example_inputs("deep_recommender")),
    "LSTM": lambda: (Recurrent().eval(), (torch.randn(1, 20, 64),)),
    "detection (YOLOS)": _yolos,
    "detection (SSDlite)": _detection,
}


def fused_channels_last(model: nn.Module, args: tuple[Any, ...]) -> Call:
    """What people do by hand: torch.fx's fusion of batch norms, and channels last."""
    import torch.fx.experimental.optimization as optimization

    fused = optimization.fuse(model).to(memory_format=torch.channels_last)
    given = tuple(item.contiguous(memory_format=torch.channels_last) if item.dim() == 4 else item for item in args)
    return lambda: fused(*given)


def alone(name: str, model: nn.Module, args: tuple[Any, ...]) -> Call:
    """A runtime as its makers' pages use it, on the model itself as torch.export sees it."""
    find_backend(name)
    return ALONE[name](exported_model(model, args, {}), Options())


def measured(title: str, batch: int, with_compile: bool) -> dict[str, Any] | None:
    """Time one model in every way; None where its library is not installed."""
    torch.manual_seed(0)
    try:
        model, args = MODELS[title]()
    except ModuleNotFoundError:
        return None
    args, _ = of_batch(args, {}, batch) if not isinstance(args[0], list) else ((args[0] * batch,), {})
    makers: dict[str, Callable[[], Call]] = {"eager": lambda: lambda: model(*args)}
    if title in IMAGES:
        makers["fx-fused, channels last"] = lambda: fused_channels_last(model, args)
    if with_compile:
        compiled = torch.compile(model)
        makers[COMPILE] = lambda: lambda: compiled(*args)
    makers |= {f"{name} alone": (lambda name=name: alone(name, model, args)) for name in ALONE}  # type: ignore[misc]
    found: list[Any] = []

    def lowered() -> Call:
        names = [name for name in ("native", *ALONE, *(["inductor"] if with_compile else [])) if is_usable(name)]
        module = torchgraft.lower(model, args, backend=names, time_limit=300)
        found.append(module)
        return lambda: module(*args)

    makers[OURS] = lowered
    runs, ready = {}, {}
    for way, make in makers.items():
        begin = time.perf_counter()
        try:
            with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                run = make()
                run()
            runs[way] = run
        except Exception as error:
            if not (isinstance(error, BackendError) and "not installed" in str(error)):
                reason = str(error).splitlines()[0][:150] if str(error) else ""
                print(f"    {way}: {type(error).__name__}: {reason}", flush=True)
        ready[way] = time.perf_counter() - begin
    gc.collect()  # runtimes that were not chosen give back their threads
    with torch.no_grad():
        begin = time.perf_counter()
        model(*args)
        slow = time.perf_counter() - begin
    times = in_turns(runs, rounds=3 if slow > 1 else 5 if slow > 0.3 else 9)
    return {"times": times, "ready": ready, "module": found[0] if found else None}


def is_usable(name: str) -> bool:
    """Whether a backend is installed."""
    try:
        find_backend(name)
    except BackendError:
        return False
    return True


def show(title: str, batch: int, found: dict[str, Any]) -> float | None:
    """Print a model's rows; how ours does beside the best of the others."""
    times, eager, module = found["times"], found["times"]["eager"], found["module"]
    print(f"{title}, batch {batch}", flush=True)
    for way, took in sorted(times.items(), key=lambda item: item[1]):
        chosen = f"   chooses {chosen_by(module)}" if way == OURS else ""
        print(
            f"    {way:<26} {took * 1e3:10.3f} ms {eager / took:7.2f} x   ready in {found['ready'][way]:5.1f} s{chosen}",
            flush=True,
        )
    if module is None:
        return None
    if module.choice is not None:
        rows = [f"{row.backend} {row.seconds * 1e3:.3f} ms" for row in module.choice.measurements if row.seconds]
        print(f"    seen by auto: {', '.join(rows)}")
        for row in module.choice.measurements:
            if row.seconds is None:
                print(f"    {row.backend}: {row.note[:150]}", flush=True)
    stays = module.explain().splitlines()
    if len(stays) > 1 or "own Python" in stays[0]:
        print("    " + "\n    ".join(line[:160] for line in stays[:4]), flush=True)
    share = min(took for way, took in times.items() if way != OURS) / times[OURS]
    print(f"    as a part of the best of the others: {share:.2f}\n", flush=True)
    return share


def chosen_by(module: Any) -> str:
    """The backend that `auto` took."""
    if module is None:
        return "-"
    return (
        module.backend.name if all(item.program is not None for item in module._variants) else "the model's own Python"
    )


def take_row(title: str, batch: int, with_compile: bool, path: Path) -> None:
    """Measure and print one row, and write it to a file."""
    found = measured(title, batch, with_compile)
    if found is not None:
        share = show(title, batch, found)
        module = found.pop("module")
        seen = module.choice.measurements if module is not None and module.choice is not None else []
        found |= {"share": share, "chosen": chosen_by(module), "auto": {row.backend: row.seconds for row in seen}}
    path.write_text(json.dumps(found))


def row_alone(title: str, batch: int, with_compile: bool, threads: int, seconds: float) -> dict[str, Any] | None:
    """One row, measured in a process of its own; None where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, "-m", "benchmarks.lower_cpu", "--row", title, "--batch", str(batch)]
        command += ["--threads", str(threads), "--found", str(path), *(["--compile"] if with_compile else [])]
        code, said = run_alone(command, seconds, {})
        print(said, flush=True)
        if path.exists():
            return json.loads(path.read_text())
    print(f"{title}, batch {batch}: its process ended with {code}\n", flush=True)
    return None


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The table of docs/lower.md: times eager."""
    peers = ["fx-fused, channels last", COMPILE, *[f"{name} alone" for name in ALONE]]
    peers = [way for way in peers if any(way in found["times"] for found in rows.values())]
    lines = [f"| | eager | {' | '.join(peers)} | `lower`, native | `lower`, auto | it chose | of the best |"]
    lines.append("|---|" + "---|" * (len(peers) + 5))
    for title, found in rows.items():
        times, eager = found["times"], found["times"]["eager"]
        cells = [f"{eager / times[way]:.2f}" if way in times else "" for way in peers]
        seen = found["auto"]
        cells.append(f"{seen['eager'] / seen['native']:.1f}" if seen.get("eager") and seen.get("native") else "")
        cells += [f"**{eager / times[OURS]:.2f}**" if OURS in times else "", found["chosen"]]
        cells.append("" if found["share"] is None else f"{found['share']:.2f}")
        lines.append(f"| {title} | {eager * 1e3:.3g} ms | {' | '.join(cells)} |")
    return "\n".join(lines)


def finding() -> None:
    """What it costs to find a variant that is there already."""
    module = torchgraft.adapt(lambda x, y=None: x if y is None else y)
    x = torch.ones(3)
    module(x), module(x, x)
    program = module._variants[0].program

    def alternate() -> None:
        module(x)
        module(x, x)

    direct = min(timeit.repeat(lambda: program(x), number=2000, repeat=7)) / 2000
    took = min(timeit.repeat(alternate, number=2000, repeat=7)) / 4000
    print(
        f"finding a variant that exists: {(took - direct) * 1e6:.1f} µs on top of {direct * 1e6:.1f} µs of the program itself\n"
    )


def looking() -> None:
    """What it costs to see that nothing of a model has changed: right after a call, which fills the caches, and once more."""
    for title in ("MobileNetV3", "EfficientNet", "LSTM"):
        try:
            model, args = MODELS[title]()
        except ModuleNotFoundError:
            continue
        module = torchgraft.lower(model, args, backend="native")
        assert module._watch is not None
        took: dict[str, list[float]] = {"after a call": [], "once more": []}
        for _ in range(100):
            module(*args)
            for times in took.values():
                begin = time.perf_counter()
                module._watch.change()
                times.append(time.perf_counter() - begin)
        texts = [f"{statistics.median(times) * 1e6:.1f} µs {when}" for when, times in took.items()]
        print(f"looking whether {title} has changed: {', '.join(texts)}")


def getting_ready() -> None:
    """How long until the first result of ResNet-50, natively and by torch.compile; and a small model natively beside eager."""
    model, x = zoo.create("resnet50").eval(), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        model(x)
        begin = time.perf_counter()
        torchgraft.lower(model, x, backend="native")(x)
        ours = time.perf_counter() - begin
        begin = time.perf_counter()
        torch.compile(model)(x)
        print(
            f"ResNet-50 until its first result: native {ours:.2f} s, torch.compile {time.perf_counter() - begin:.1f} s"
        )
        mlp, x = small_mlp(), torch.randn(1, 16)
        fast = torchgraft.lower(mlp, x, backend="native")
        times = in_turns({"eager": lambda: mlp(x), "native": lambda: fast(x)}, rounds=9)
    took = " and ".join(f"{name} {seconds * 1e6:.1f} µs" for name, seconds in times.items())
    print(f"MLP of 12 modules, batch 1: {took}, {times['eager'] / times['native']:.2f} times eager\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help=f"models, with commas: {', '.join(MODELS)}")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--batch", default="", help="batches, with commas")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--missing", action="store_true", help="only rows that --output does not have yet")
    parser.add_argument(
        "--ready", action="store_true", help="only how long lowering takes, and what a call costs at least"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/lower.md, too")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for one row")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all of them")
    parser.add_argument("--output", default="build/lower_cpu.json")
    for name in ("--row", "--found"):  # what a process of one row is told
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    batches = [int(item) for item in arguments.batch.split(",") if item]
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # exporters say at length what they do not take
    torch.set_num_threads(arguments.threads)
    installed = [
        name for name in ("torchvision", "transformers", "openvino", "onnxruntime") if importlib.util.find_spec(name)
    ]
    if "torchvision" in installed:
        import_torchvision()  # before transformers, which imports it in its own way
    if arguments.row:
        take_row(arguments.row, batches[0], arguments.compile, Path(arguments.found))
        return
    print(f"torch {torch.__version__}, {arguments.threads} threads, with {', '.join(installed)}\n")
    finding()
    if arguments.ready:
        looking()
        getting_ready()
        return
    begin = time.perf_counter()
    output = Path(arguments.output)
    rows: dict[str, dict[str, Any]] = json.loads(output.read_text()) if output.exists() else {}
    for title in MODELS:
        if arguments.only and title not in arguments.only.split(","):
            continue
        for batch in batches if batches else (1, 16) if arguments.all or title == "ResNet-50" else (1,):
            name = f"{title}, batch {batch}"
            known = rows.get(name, {"times": {}})["times"]
            if arguments.missing and known and (COMPILE in known or not arguments.compile):
                continue
            for with_compile in (True, False) if arguments.compile else (False,):
                left = arguments.budget - (time.perf_counter() - begin)
                if left < arguments.limit / 4:
                    print(f"{name}: left out, the budget was used up\n", flush=True)
                    break
                found = row_alone(title, batch, with_compile, arguments.threads, min(left, arguments.limit))
                if found is not None:
                    rows[name] = found
                    write_text(output, json.dumps(rows, indent=1))
                    break
    shares = [found["share"] for found in rows.values() if found["share"] is not None]
    took = time.perf_counter() - begin
    print(f"all of it in {took:.0f} s; the least share of the best peer in {output} is {min(shares, default=0):.2f}")
    if arguments.markdown:
        print("\n" + markdown(rows))


if __name__ == "__main__":
    main()
