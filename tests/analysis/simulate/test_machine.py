"""Machines as files: each that comes with torchgraft is whole and sane, and what is wrong in one is named with its line."""

import re

import pytest
import torch
from torch import nn

from torchgraft import Machine, machine_names, simulate
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import NEEDED, _parsed, machine_text
from torchgraft.analysis.simulate.timing import time_of
from torchgraft.errors import GraftError

GPUS = ("h200", "h100_sxm", "a100_80gb", "v100", "l4", "rtx_4090")
CPUS = ("epyc", "xeon_platinum", "epyc_turin_1_thread", "epyc_turin_2_threads")
KINDS = (
    "matmul",
    "convolution",
    "attention",
    "recurrent",
    "elementwise",
    "copy",
    "norm",
    "reduction",
    "pooling",
    "gather",
    "sort",
)
KNOWN = "fp64, fp32, tf32, bf16, fp16, fp8, int8"
MUST = "it must be a number that is not negative"

WHOLE = """\
name = "mine"
kind = "gpu"
source = "a guess"

[device]
units = 10
memory_bytes = 8e9

[peak]
fp32 = 1e13

[memory]
bandwidth = 1e12
cache_bytes = 4e6
cache_bandwidth = 3e12

[kernels.elementwise]
floor = 1e-6
bandwidth = 0.8

[host]
operator = 1e-5
"""


def big_copy(type="fp32"):
    return Kernel("aten.add.Tensor", "elementwise", type, 10**8, 8 * 10**8, 4 * 10**8, elements=10**8)


def big_product(type="fp32"):
    size = 8192
    bytes_ = size * size * (2 if type in ("fp16", "bf16") else 4)
    return Kernel(
        "aten.mm.default", "matmul", type, 2 * size**3, 2 * bytes_, bytes_, sizes=(1, size, size, size), variant="nn"
    )


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_is_whole(name):
    machine = Machine.named(name)
    assert machine.file == f"{name}.toml" and len(machine.source) > 20 and "fp32" in machine.precisions
    assert machine.kind in ("gpu", "cpu") and machine.units >= 1 and machine.bandwidth < machine.cache_bandwidth
    assert machine.cache_bytes < machine.memory_bytes and machine.host["module"] > 0
    for kind in KINDS:
        figures = machine.figures(kind, "fp32" if kind in NEEDED and machine.kind == "gpu" else "", "fp32")
        assert figures["floor"] > 0, kind
    for precision in machine.precisions:
        if precision in ("fp32", "bf16", "fp16"):
            seconds = time_of(big_product(precision), machine).seconds
            share = 2 * 8192**3 / seconds / machine.peak[precision]
            assert 0.2 < share <= 1.15, (precision, share)
    share = big_copy().bytes / time_of(big_copy(), machine).seconds / machine.bandwidth
    assert 0.3 < share <= 1.3, share


def test_all_that_were_asked_for_are_there():
    assert set(GPUS) | set(CPUS) <= set(machine_names())
    assert all(Machine.named(name).kind == "gpu" for name in GPUS) and all(
        Machine.named(name).kind == "cpu" for name in CPUS
    )
    assert all(Machine.named(name).watts for name in (*GPUS, "epyc", "xeon_platinum"))
    assert "tf32" not in Machine.named("v100").precisions and "bf16" not in Machine.named("v100").precisions


def test_kernels_bound_by_memory_differ_as_bandwidths_do():
    first, second = Machine.named("h100_sxm"), Machine.named("h200")
    ratio = time_of(big_copy(), first).seconds / time_of(big_copy(), second).seconds
    assert ratio == pytest.approx(4.8 / 3.35, rel=0.01)
    products = [time_of(big_product("fp16"), machine).seconds for machine in (first, second)]
    assert products[0] == pytest.approx(products[1], rel=0.02)


def test_slower_machines_are_slower():
    order = ("h200", "h100_sxm", "a100_80gb", "v100", "l4")
    copies = [time_of(big_copy(), Machine.named(name)).seconds for name in order]
    assert copies == sorted(copies)
    products = [
        time_of(big_product("fp16"), Machine.named(name)).seconds for name in ("h200", "a100_80gb", "rtx_4090", "l4")
    ]
    assert products == sorted(products)


def test_a_cpu_runs_a_model():
    model, x = (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)),
        torch.empty(4, 3, 8, 8),
    )
    found = {name: simulate(model, x, machine=name).seconds for name in CPUS}
    assert all(1e-5 < seconds < 1e-2 for seconds in found.values()), found


def test_a_machine_like_another_has_its_kernels():
    text = WHOLE.replace("[kernels.elementwise]\nfloor = 1e-6\nbandwidth = 0.8\n\n[host]\noperator = 1e-5\n", "")
    text = text.replace('source = "a guess"', 'source = "a guess"\nlike = "h200"\nlike_rates = 0.5')
    h200 = Machine.named("h200")
    found = _parsed(text, "mine.toml")
    assert found.host == h200.host and found.kernels.keys() == h200.kernels.keys()
    sort = found.kernels["sort"]
    assert sort["floor"] == h200.kernels["sort"]["floor"] and sort["elements"] == 0.5 * h200.kernels["sort"]["elements"]
    own = _parsed(text + "\n[kernels.sort]\nfloor = 1\n", "mine.toml")
    assert own.kernels["sort"] == {"floor": 1.0} and own.kernels["gather"] == found.kernels["gather"]


@pytest.mark.parametrize("name", ["h200", "epyc"])
def test_a_machine_as_text_is_read_again(name):
    machine = Machine.named(name)
    again = _parsed(machine_text(machine), "again.toml")
    assert again.kernels.keys() == machine.kernels.keys() and again.host == pytest.approx(machine.host, rel=1e-3)
    assert again.fresh_bandwidth == machine.fresh_bandwidth and again.units == machine.units
    for kind, figures in machine.kernels.items():
        assert again.kernels[kind] == pytest.approx(figures, rel=1e-3), kind


# ---- what is wrong in a file ----


def said(text):
    with pytest.raises(GraftError) as error:
        _parsed(text, "mine.toml")
    return str(error.value)


def test_it_is_read_as_it_stands():
    assert _parsed(WHOLE, "mine.toml").bandwidth == 1e12


@pytest.mark.parametrize(
    ("before", "after", "message", "line"),
    [
        ("units = 10\n", "", "the figure 'units' is missing in [device]", 5),
        ("bandwidth = 1e12\n", "", "the figure 'bandwidth' is missing in [memory]", 12),
        ('source = "a guess"\n', "", "the figure 'source' is missing", 1),
        ("[peak]\nfp32 = 1e13\n", "", "the table [peak] is missing", 1),
        ("fp32 = 1e13", "", "the table [peak] has no precision", 9),
        ("fp32 = 1e13", "fp31 = 1e13", f"the precision 'fp31' is not known; write one of {KNOWN}", 10),
        ("bandwidth = 1e12", "bandwidth = -1e12", f"'memory.bandwidth' is -1000000000000.0; {MUST}", 13),
        ("bandwidth = 1e12", "bandwidth = 0", "'memory.bandwidth' is 0; it must be positive", 13),
        ("bandwidth = 1e12", "bandwidth = nan", f"'memory.bandwidth' is nan; {MUST}", 13),
        ("units = 10", "units = true", f"'device.units' is True; {MUST}", 6),
        ("floor = 1e-6", "floor = -1e-6", f"'kernels.elementwise.floor' is -1e-06; {MUST}", 18),
        ("operator = 1e-5", "operator = -1", f"'host.operator' is -1; {MUST}", 22),
        ('kind = "gpu"', 'kind = "tpu"', "kind is 'tpu'; it must be \"gpu\" or \"cpu\"", 2),
        ('kind = "gpu"', 'kind = "cpu"\nlike = "h200"', "it is a cpu like h200, which is a gpu", 3),
        ('kind = "gpu"', 'kind = "gpu"\nlike = "h200"\nlike_rates = -1', "'like_rates' is -1; it must be positive", 4),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(before, after, message, line):
    assert WHOLE.count(before) == 1
    end = "\n  compare it with one that graft calibrate writes"
    assert (
        said(WHOLE.replace(before, after)) == f"the machine file cannot be used: {message}\n  at mine.toml:{line}{end}"
    )


def test_what_is_no_toml_says_so():
    assert said("name = \n").startswith("the machine file 'mine.toml' is no TOML: ")


def test_a_name_that_is_none_names_all():
    with pytest.raises(
        GraftError, match=r"there is no machine named 'h900'\nchoose one of a100_80gb, .*graft calibrate writes one"
    ):
        Machine.named("h900")
    with pytest.raises(GraftError, match=r"it is like 'h900', which does not come with torchgraft \(a100_80gb, "):
        _parsed(WHOLE.replace('kind = "gpu"', 'kind = "gpu"\nlike = "h900"'), "mine.toml")


def test_figures_that_are_asked_for_and_missing_are_named():
    machine = _parsed(
        WHOLE.replace("[kernels.elementwise]", "[kernels.matmul.fp32]\nrate = 1\nhalf = 1\nstep = 1e-9"), "mine.toml"
    )
    with pytest.raises(GraftError) as error:
        time_of(Kernel("aten.sort", "sort", "fp32", elements=10), machine)
    assert str(error.value) == (
        "the machine mine has no figures for kernels of the kind 'sort'\n"
        "  in mine.toml: write a table [kernels.sort], or at least [kernels.elementwise]"
    )


@pytest.mark.parametrize(
    ("machine", "precision", "message"),
    [
        (
            "v100",
            "tf32",
            "NVIDIA V100 SXM2 32 GB has no tf32\nit has fp64, fp32, fp16; choose one of these, or another machine",
        ),
        (
            "v100",
            "bf16",
            "NVIDIA V100 SXM2 32 GB has no bf16\nit has fp64, fp32, fp16; choose one of these, or another machine",
        ),
        (
            "epyc",
            "tf32",
            "AMD EPYC 9654, one socket has no tf32\nit has fp64, fp32, bf16; choose one of these, or another machine",
        ),
    ],
)
def test_a_precision_that_a_machine_lacks_is_said(machine, precision, message):
    with pytest.raises(GraftError) as error:
        simulate(nn.Linear(4, 4), torch.empty(2, 4), machine=machine, precision=precision)
    assert str(error.value) == message


H200_TEXT = machine_text(Machine.named("h200"))
TURIN_TEXT = machine_text(Machine.named("epyc_turin_1_thread"))


@pytest.mark.parametrize(
    ("text", "before", "after", "message", "line"),
    [
        (
            H200_TEXT,
            r"bandwidth = 4.8e\+12",
            'bandwidth = "fast"',
            "'memory.bandwidth' is 'fast'; it must be a number",
            "fast",
        ),
        (
            H200_TEXT,
            r"bandwidth = 4.8e\+12",
            "bandwidth = inf",
            "'memory.bandwidth' is inf; it must be a number",
            "inf",
        ),
        (H200_TEXT, r"fp32 = 6.7e\+13", 'fp32 = "67T"', "'peak.fp32' is '67T'; it must be a number", "67T"),
        (H200_TEXT, "units = 132", "units = 1.5", "'device.units' is 1.5; it must be a whole number", "units"),
        (H200_TEXT, "name = .*", "name = 5", "name is 5; it must be a text", "name"),
        (
            H200_TEXT,
            "kind = .*",
            'kind = "gpu"\nlike = "h200"\nlike_rates = "x"',
            "'like_rates' is 'x'; it must be positive",
            "rates",
        ),
        (
            H200_TEXT,
            r"(\[kernels.matmul.fp32\]\n)floor.*",
            r"\1",
            "the figure 'floor' is missing in [kernels.matmul.fp32]",
            "matmul.fp32]",
        ),
        (
            H200_TEXT,
            "rate = 1\nhalf = 75\n",
            "half = 75\n",
            "the figure 'rate' is missing in [kernels.matmul.fp32]",
            "matmul.fp32]",
        ),
        (
            H200_TEXT,
            "rate = 1\nhalf = 75\n",
            "rate = 0 # none\nhalf = 75\n",
            "'kernels.matmul.fp32.rate' is 0; it must be positive",
            "# none",
        ),
        (H200_TEXT, "each = 1.192", "", "the figure 'each' is missing in [kernels.recurrent.fp16]", "recurrent.fp16]"),
        (
            TURIN_TEXT,
            r"(\[kernels.copy\]\n)floor",
            r"\1flor",
            "the figure 'floor' is missing in [kernels.copy]",
            "kernels.copy]",
        ),
        (TURIN_TEXT, r"near = 6.223", "near = 0", "'kernels.attention.near' is 0; it must be positive", "near = 0"),
    ],
)
def test_figures_that_cannot_be_used_are_named_with_their_line(text, before, after, message, line, tmp_path):
    changed, count = re.subn(before, after, text, count=1)
    assert count == 1
    number = next(number for number, one in enumerate(changed.splitlines(), 1) if line in one)
    (tmp_path / "mine.toml").write_text(changed)
    with pytest.raises(GraftError) as error:
        Machine.named(tmp_path / "mine.toml")
    assert message in str(error.value) and f"mine.toml:{number}\n" in str(error.value)


@pytest.mark.parametrize("kind", ["matmul", "attention"])
def test_a_gpu_without_figures_of_products_says_so(kind, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(re.sub(rf"\[kernels.{kind}[^\]]*\]\n([a-z_]+ = .*\n)+", "", H200_TEXT))
    heads = torch.empty(1, 2, 8, 16, device="meta")
    model = torch.nn.Linear(16, 16) if kind == "matmul" else Attends()
    with pytest.raises(
        GraftError, match=rf"no figures for kernels of the kind '{kind}'\n.*write a table \[kernels.{kind}\]"
    ):
        simulate(model, heads, machine=path)


class Attends(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(GraftError, match="is no TOML: it is not text in UTF-8"):
        Machine.named(tmp_path / "mine.toml")
