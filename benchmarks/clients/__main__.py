"""`python -m benchmarks.clients`: ports each client, runs its cases on torch.fx and on torchgraft, prints and writes the table.
How a package is ported is in `port.py`, how cases run in `running.py`, the cases themselves in `cases/`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clients.port import FX, port_package, port_text

HEAD = """\
# Clients of torch.fx, ported by an import

Written by `make test-clients`. Each client is installed from PyPI and run twice on the same cases: as it is, and as a copy in
which `torch.fx` is called `torchgraft` and nothing else is changed. A case checks a result against eager, and what it returns
(nodes, code, names of parameters) must be the same on both; guards, regions, flags of modes and `+=`, which torchgraft records
[on purpose](from_torch_fx.md#what-is-different-on-purpose), are left out of the comparison. In the first row that is so only for
models whose code has such a trap; of the 44 others every node is compared, as it is. For five families of transformers
that ask whether a mask or weight is a tensor (GPT-Neo, GPT-J, Bloom, T5, mT5) results are compared, and nodes are not: torch.fx
records the branch that eager does not take. The cases, in `benchmarks/clients/cases/`, are ours, in the manner of each client,
and those that torch.fx itself passes on this torch; the clients' own tests are not among them.

| client | what it does with torch.fx | cases | torch.fx | ours | why not |
|---|---|---:|---:|---:|---|"""

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "clients"


@dataclass(frozen=True)
class Client:
    """A client: the distribution it comes in, and the packages that are ported, each with the name of its copy."""

    name: str
    distribution: str
    packages: tuple[str, ...]
    does: str
    renamed: dict[str, str] = field(default_factory=dict)

    @property
    def cases(self) -> Path:
        return HERE / "cases" / f"{self.name}.py"


# A part of torch cannot have a second copy under its own name. Its layers stay torch's: torch.fx keeps them whole by their name.
AO = {f"torch.ao.{name}": f"torch_ao.{name}" for name in ("ns", "pruning", "quantization")}

# The rest of TVM is compiled, and knows nothing of torch.fx.
TVM = {"tvm.relax.frontend.torch": "tvm_torch_frontend"}

CLIENTS = (
    Client(
        "symbolic", "torch", ("torchvision", "timm"), "symbolic_trace of torchvision, timm and zoo models: every node"
    ),
    Client("torchvision", "torchvision", ("torchvision",), "feature extraction"),
    Client("timm", "timm", ("torchvision", "timm"), "FeatureGraphNet"),
    Client("transformers", "transformers", ("transformers",), "HFTracer"),
    Client("torch_geometric", "torch-geometric", ("torch_geometric",), "to_hetero, to_fixed_size"),
    Client("e3nn", "e3nn", ("opt_einsum_fx", "e3nn"), "generated tensor products"),
    Client("opt_einsum_fx", "opt-einsum-fx", ("opt_einsum_fx",), "einsum optimization"),
    Client("onnx2torch", "onnx2torch", ("onnx2torch",), "ONNX import"),
    Client("brevitas", "brevitas", ("brevitas",), "tracing, rewriting before quantization"),
    Client("hls4ml", "hls4ml", ("hls4ml",), "models for hardware"),
    Client("nirtorch", "nirtorch", ("nirtorch",), "neuromorphic graphs"),
    Client("torch_ao", "torch", tuple(AO), "torch.ao.quantization: prepare_fx, convert_fx", AO),
    Client("mct", "model-compression-toolkit", ("model_compression_toolkit",), "graph reading"),
    Client("aimet", "aimet-torch", ("aimet_torch",), "model preparer"),
    Client("optimum", "optimum", ("transformers", "optimum.fx"), "transformations of graphs"),
    Client("torch_tensorrt", "torch-tensorrt", ("torch_tensorrt",), "acc_tracer"),
    Client("tvm", "apache-tvm", tuple(TVM), "Relax importer", TVM),
    Client("modelopt", "nvidia-modelopt", ("modelopt",), "pruning and quantization"),
)

# Where ours differs on purpose: the client, a text in the names of the cases, and why. docs/from_torch_fx.md has all of it.
_BUFFERS = "what is done with a buffer is recorded; torch.fx computes it while tracing and bakes it in"
_FLAG = "`self.training` is a node, asked when the program runs, where the client expects tensors alone; torch.fx bakes it in"
_IN_PLACE = (
    "`+=` with an input of a block stays in place: under autocast it is not `+`. The client looks for `operator.add`"
)
_CLASS = "the result keeps its class, `OrderedDict`; torch.fx returns a plain dict"
_DEVICE = "the device of a parameter is asked when the program runs, so that it can be moved; torch.fx bakes it in"
ON_PURPOSE = (
    ("symbolic", "maxvit_t", _BUFFERS),
    ("symbolic", "fcn_resnet50", _CLASS),
    ("symbolic", "deeplabv3_resnet50", _CLASS),
    ("symbolic", "lraspp_mobilenet_v3_large", _CLASS),
    ("symbolic", "edgenext_xx_small", _DEVICE),
    ("symbolic", "xcit_nano_12_p16_224", _DEVICE),
    ("torchvision", "maxvit_t", _BUFFERS),
    ("timm", "swin_tiny", _BUFFERS),
    (
        "timm",
        "levit",
        "`str(x.device)` as the key of a cache is refused; torch.fx leaves a proxy in the cache of the model",
    ),
    ("mct", "Constants", "`torch.ones` is recorded; torch.fx bakes it in"),
    ("mct", "efficientnet_b0", _FLAG),
    ("mct", "convnext_tiny", _FLAG),
    ("modelopt", "resnet18", _IN_PLACE),
    ("modelopt", "mobilenet_v3_small", _IN_PLACE),
)


def main() -> None:
    options = _options()
    rows = []
    for client in CLIENTS:
        if options.client and client.name not in options.client:
            continue
        row = _row(client, options)
        rows.append(row)
        print(_line(row), flush=True)
        for name, why in row["differences"]:
            print(f"    {name}: {why}", flush=True)
    if options.markdown:
        Path(options.markdown).write_text(_page(rows), encoding="utf-8")
    sys.exit(any(not _reason(row["client"], name) for row in rows for name, _ in row["differences"]))


def _reason(client: Client, case: str) -> str | None:
    return next((reason for name, text, reason in ON_PURPOSE if name == client.name and text in case), None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("client", nargs="*", help="the clients to run; all by default")
    parser.add_argument("--cases", default="", help="only cases with this text in their name")
    parser.add_argument("--markdown", help="write the table to this page")
    parser.add_argument("--reuse-control", action="store_true", help="take the rows of torch.fx from the last run")
    parser.add_argument("--trace", action="store_true", help="print the traceback of each failure")
    return parser.parse_args()


def _row(client: Client, options: argparse.Namespace) -> dict[str, Any]:
    folder = BUILD / client.name
    folder.mkdir(parents=True, exist_ok=True)
    control_rows = folder / "control.jsonl"
    if not (options.reuse_control and control_rows.exists()):
        _run(client.cases, [], control_rows, options.cases)
    ported = _ported(client, folder)
    _run(ported / "cases" / client.cases.name, [ported], folder / "ours.jsonl", options.cases)
    control, ours = _read(control_rows), _read(folder / "ours.jsonl")
    control = {name: row for name, row in control.items() if options.cases in name}
    good = [name for name, row in control.items() if "error" not in row]
    differences = [(name, why) for name in good if (why := _difference(control[name], ours.get(name)))]
    if "import" in ours:
        differences = [("import", ours["import"]["error"])]
    broken = [(name, row["error"]) for name, row in control.items() if "error" in row]
    if options.trace:
        for row in ours.values():
            if "error" in row and row["case"] in [*good, "import"]:
                print(f"--- {row['case']}\n{row['trace']}")
    return {
        "client": client,
        "cases": len(control),
        "control": len(good),
        "ours": 0 if "import" in ours else len(good) - len(differences),
        "differences": differences,
        "broken": broken,
    }


def _ported(client: Client, folder: Path) -> Path:
    """The folder with the ported copies of the client's packages and of its cases."""
    target = folder / "ported"
    names = {**FX, **client.renamed}
    for package in client.packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(
                f"{package} is not installed; `make test-clients` makes an environment that has it"
            )
        port_package(Path(spec.origin).parent, target.joinpath(*client.renamed.get(package, package).split(".")), names)
    (target / "cases").mkdir(exist_ok=True)
    cases = port_text(client.cases.read_text(encoding="utf-8"), names)
    (target / "cases" / client.cases.name).write_text(cases, encoding="utf-8")
    return target


def _run(cases: Path, paths: list[Path], result: Path, only: str) -> None:
    path = os.pathsep.join(map(str, [*paths, ROOT / "src", ROOT]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    command = [sys.executable, "-m", "benchmarks.clients.running", str(cases), str(result), only]
    result.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as empty:  # some clients write files where they run
        done = subprocess.run(command, env=environment, cwd=empty, capture_output=True, text=True, check=False)
    if done.returncode:
        with result.open("a", encoding="utf-8") as out:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            out.write(json.dumps({"case": "import", "error": last, "trace": done.stderr}) + "\n")


def _read(file: Path) -> dict[str, dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        return {row["case"]: row for row in map(json.loads, lines)}


def _difference(control: dict[str, Any], ours: dict[str, Any] | None) -> str | None:
    if ours is None:
        return "did not run"
    if "error" in ours:
        return str(ours["error"])
    if control["result"] != ours["result"]:
        return f"another result: {_first_difference(control['result'], ours['result'])}"
    return None


def _first_difference(control: Any, ours: Any) -> str:
    if isinstance(control, list) and isinstance(ours, list):
        for one, other in zip(control, ours, strict=False):
            if one != other:
                return _first_difference(one, other)
        return f"{len(ours)} items, torch.fx {len(control)}"
    return f"{str(ours)[:150]!r}, torch.fx {str(control)[:150]!r}"


def _line(row: dict[str, Any]) -> str:
    return f"{row['client'].name:18} cases {row['cases']:4}   torch.fx {row['control']:4}   ours {row['ours']:4}"


def _page(rows: list[dict[str, Any]]) -> str:
    lines = [HEAD]
    for row in rows:
        client = row["client"]
        version = importlib.metadata.version(client.distribution).partition("+")[0]
        why = Counter(_reason(client, name) or why.replace("|", "\\|") for name, why in row["differences"])
        reasons = "; ".join(f"{count}: {text}" for text, count in why.most_common(4))
        lines.append(
            f"| {client.distribution} {version} | {client.does} | {row['cases']} | {row['control']} | {row['ours']} | {reasons} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
