"""What a simulation says of a program: modes, precisions, memory, energy, training, what nothing is known about, and physics."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchgraft
from benchmarks.allocations import taken_on_cpu
from torchgraft import Machine, simulate, zoo
from torchgraft.analysis.simulate.simulate import recorded
from torchgraft.errors import GraftError

H200 = Machine.named("h200")
CPU = dataclasses.replace(H200, name="a CPU", kind="cpu")  # the same figures, on the host


def mlp(width=1024, device="meta"):
    layers = [nn.Linear(width, width, device=device), nn.ReLU(), nn.Linear(width, width, device=device)]
    return nn.Sequential(*layers).eval()


def inputs(batch=8, width=1024):
    return torch.empty(batch, width, device="meta")


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64)),
        *(nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    ).eval()


IMAGES = torch.empty(4, 3, 64, 64, device="meta")


class Everything(nn.Module):
    """Kernels of most kinds in one model."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(100, 64), nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.recurrent = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, 100)

    def forward(self, words):
        x = self.norm(self.table(words))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.recurrent(x)[0]
        return self.head(x.cumsum(1)).topk(5, -1).values.softmax(-1)


WORDS = torch.zeros(4, 16, dtype=torch.long, device="meta")
SUBJECTS = {"mlp": (mlp, inputs()), "convolutions": (convolutions, IMAGES), "everything": (Everything, WORDS)}


@pytest.fixture(params=SUBJECTS)
def subject(request):
    build, args = SUBJECTS[request.param]
    return build().eval(), args


# ---- the parts make up the whole ----


@pytest.mark.parametrize("mode", ["eager", "graph", "lowered"])
@pytest.mark.parametrize("training", [False, True])
def test_the_nodes_make_up_the_whole(subject, mode, training):
    model, args = subject
    found = simulate(model, args, mode=mode, training=training)
    assert sum(node.seconds for node in found.nodes) == pytest.approx(found.seconds, rel=1e-6)
    assert sum(found.bounds.values()) == pytest.approx(found.seconds, rel=1e-6)
    assert sum(node.device_seconds for node in found.nodes) == pytest.approx(found.device_seconds)
    assert sum(kernel.seconds for kernel in found.kernels) == pytest.approx(found.device_seconds)
    assert sum(found.kinds.values()) == pytest.approx(found.device_seconds)
    assert sum(node.kernels for node in found.nodes) == len(found.kernels) > 0
    assert sum(node.flops for node in found.nodes) == sum(kernel.flops for kernel in found.kernels) > 0
    assert found.seconds >= found.device_seconds > 0 and found.training == training
    assert {node.bound for node in found.nodes} <= {"compute", "memory", "launch", "host"}


def test_kernels_run_one_after_the_other_and_after_they_were_issued(subject):
    model, args = subject
    found = simulate(model, args)
    end = 0.0
    for kernel in found.kernels:
        assert kernel.start >= end - 1e-12 and kernel.start >= kernel.issued - 1e-12
        assert kernel.seconds >= max(kernel.compute, kernel.memory)
        end = kernel.start + kernel.seconds
    assert found.seconds >= end


def test_modes(subject):
    model, args = subject
    eager, graph, lowered = (simulate(model, args, mode=mode) for mode in ("eager", "graph", "lowered"))
    assert lowered.seconds <= graph.seconds <= eager.seconds
    assert eager.host_seconds > 0 == graph.host_seconds == lowered.host_seconds
    assert graph.device_seconds == pytest.approx(eager.device_seconds)
    assert "host" not in {node.bound for node in graph.nodes}


def test_eager_mode_of_small_calls_waits_for_the_host_and_of_large_ones_for_the_device():
    small, large = simulate(mlp(16), inputs(1, 16)), simulate(mlp(8192), inputs(16384, 8192))
    assert max(small.bounds, key=small.bounds.get) == "host"
    assert max(large.bounds, key=large.bounds.get) == "compute"
    assert large.seconds == pytest.approx(large.device_seconds, rel=0.01)


def test_what_bounds_a_kernel():
    def bounds(model, args, **options):
        return [kernel.bound for kernel in simulate(model, args, mode="graph", **options).kernels]

    assert bounds(nn.ReLU(), inputs(1, 2**28)) == ["memory"]
    assert bounds(nn.ReLU(), inputs(1, 8)) == ["launch"]
    assert bounds(nn.Linear(8192, 8192, device="meta"), inputs(8192, 8192), precision="bf16") == ["compute"]
    assert bounds(nn.Linear(16384, 16384, device="meta"), inputs(1, 16384), precision="bf16") == ["memory"]


def test_a_program_is_simulated_as_its_model(subject):
    model, args = subject
    real = torch.zeros(args.shape, dtype=args.dtype)
    model = model.to_empty(device="cpu") if next(model.parameters()).is_meta else model
    program = torchgraft.capture(model, real)
    of_model, of_program = simulate(model, args, mode="graph"), simulate(program, real, mode="graph")
    assert of_program.seconds == pytest.approx(of_model.seconds, rel=0.02)


def test_lowered_folds_norms_and_joins_chains():
    model = convolutions()
    graph, lowered = (simulate(model, IMAGES, mode=mode) for mode in ("graph", "lowered"))
    # convolution; its norm is now a bias, with the ReLU in one; convolution; its bias, with the sigmoid; mean; product
    assert [kernel.kind for kernel in graph.kernels] == [
        *(
            "convolution",
            "norm",
            "elementwise",
            "convolution",
            "elementwise",
            "norm",
            "elementwise",
            "reduction",
            "matmul",
        )
    ]
    assert [kernel.kind for kernel in lowered.kernels] == [
        *("convolution", "elementwise", "convolution", "elementwise", "reduction", "matmul")
    ]
    assert sum(kernel.flops for kernel in lowered.kernels) <= sum(kernel.flops for kernel in graph.kernels)
    assert sum(kernel.bytes for kernel in lowered.kernels) < sum(kernel.bytes for kernel in graph.kernels)
    assert [node.name for node in lowered.nodes] == [node.name for node in graph.nodes]


def test_lowered_writes_what_is_needed_later():
    class Kept(nn.Module):
        def forward(self, x):
            y = x.exp()
            z = (y * 2).sigmoid()
            return z.sum(1), y.sum(0)

    size = 4 * 1024 * 1024
    lowered = simulate(Kept(), inputs(1024), mode="lowered")
    assert [kernel.kind for kernel in lowered.kernels] == ["elementwise", "reduction", "reduction"]
    assert lowered.kernels[0].bytes == 3 * size  # x is read; y, which is used again, and z are written


def test_norms_in_training_are_not_folded():
    model = convolutions().train()
    kinds = [kernel.kind for kernel in simulate(model, IMAGES, mode="lowered", training=True).kernels]
    assert kinds.count("norm") == 4


# ---- physics ----


@pytest.mark.parametrize("change", ["bandwidth", "cache_bandwidth", "peak", "host", "floor"])
@pytest.mark.parametrize("mode", ["eager", "graph", "lowered"])
def test_a_better_machine_is_never_slower(subject, change, mode):
    model, args = subject
    if change == "peak":
        better = dataclasses.replace(H200, peak={name: 2 * rate for name, rate in H200.peak.items()})
    elif change == "host":
        better = dataclasses.replace(H200, host={name: seconds / 2 for name, seconds in H200.host.items()})
    elif change == "floor":
        kernels = {kind: {**figures, "floor": figures["floor"] / 2} for kind, figures in H200.kernels.items()}
        better = dataclasses.replace(H200, kernels=kernels)
    else:
        better = dataclasses.replace(H200, **{change: 2 * getattr(H200, change)})
    before, after = (simulate(model, args, mode=mode, machine=machine) for machine in (H200, better))
    assert after.seconds <= before.seconds * (1 + 1e-9) and after.peak_bytes == before.peak_bytes


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["fp32", "tf32", "fp16"]))
def test_time_and_memory_grow_with_the_batch(one, other, precision):
    less, more = sorted((one, other))
    first, second = (
        simulate(mlp(512), inputs(batch, 512), mode="graph", precision=precision) for batch in (less, more)
    )
    assert first.seconds <= second.seconds * (1 + 1e-9) and first.peak_bytes <= second.peak_bytes


@pytest.mark.parametrize("subject", ["convolutions", "everything"], indirect=True)
def test_twice_the_batch_takes_longer_and_at_most_little_more_than_twice(subject):
    model, args = subject
    shape = args.shape[1:]
    times = [simulate(model, args.new_empty(batch, *shape), mode="graph").seconds for batch in (32, 64, 128)]
    assert times == sorted(times) and all(second <= 2.2 * first for first, second in itertools.pairwise(times))


def test_narrow_types_are_faster_in_large_products():
    times = [
        simulate(mlp(4096), inputs(4096, 4096), mode="graph", precision=precision).seconds
        for precision in ("fp64", "fp32", "tf32", "bf16")
    ]
    assert times == sorted(times, reverse=True)
    half, brain = (simulate(mlp(4096), inputs(4096, 4096), mode="graph", precision=name) for name in ("fp16", "bf16"))
    assert half.seconds == brain.seconds  # as wide, so as fast where a machine has no figures of its own


def test_no_kernel_is_faster_than_the_machine_at_its_best(subject):
    model, args = subject
    for precision in ("fp32", "fp16"):
        for kernel in simulate(model, args, mode="graph", precision=precision).kernels:
            assert kernel.flops <= H200.peak[kernel.type] * kernel.seconds * 1.001
            assert kernel.bytes <= H200.cache_bandwidth * 1.1 * kernel.seconds


# ---- precisions ----


def test_precisions_are_those_of_parameters_and_inputs():
    whole, half = simulate(mlp(), inputs(), precision="fp32"), simulate(mlp(), inputs(), precision="fp16")
    assert {kernel.type for kernel in half.kernels} == {"fp16"} and half.memory.peak * 2 == whole.memory.peak
    as_it_is = simulate(mlp().half(), inputs().half())
    assert as_it_is.precision == "fp16" and as_it_is.seconds == half.seconds
    words = simulate(Everything().eval(), WORDS, precision="fp16")
    assert {kernel.type for kernel in words.kernels} == {"fp16"}  # what are whole numbers stays so


def test_tf32_is_fp32_with_faster_products():
    plain, fast = (simulate(convolutions(), IMAGES, precision=name) for name in ("fp32", "tf32"))
    types = {kernel.kind: kernel.type for kernel in fast.kernels}
    assert types["matmul"] == types["convolution"] == "tf32" and types["elementwise"] == types["norm"] == "fp32"
    assert plain.peak_bytes == fast.peak_bytes


def test_the_model_and_the_inputs_stay_as_they_are():
    model, x = mlp(8, "cpu"), torch.ones(2, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    simulate(model, x, precision="fp16", optimizer=torch.optim.SGD)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert x.dtype == torch.float32 and all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


# ---- memory ----


@pytest.mark.parametrize("options", [{}, {"training": True}, {"optimizer": torch.optim.SGD}])
def test_peak_memory_is_what_memory_says(subject, options):
    model, args = subject
    real = torch.zeros(args.shape, dtype=args.dtype)
    model = model.to_empty(device="cpu") if next(model.parameters()).is_meta else model
    found = simulate(model, real, machine=CPU, **options)
    expected = torchgraft.memory(model, real, **options)
    assert found.peak_bytes == expected.peak and found.memory.at_peak == expected.at_peak
    on_gpu = simulate(model, real, **options)
    tensors = len(list(model.parameters())) * 4 + 100  # on a GPU memory is handed out in pieces of 512 bytes
    assert on_gpu.memory.peak <= expected.peak * 1.05 + 512 * tensors
    has_products = any(kernel.kind == "matmul" for kernel in on_gpu.kernels)
    assert on_gpu.peak_bytes - on_gpu.memory.peak == on_gpu.workspace_bytes == has_products * H200.workspace_bytes


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_peak_memory_on_this_cpu_is_what_is_measured(name):
    model, args = zoo.create(name).eval(), zoo.example_inputs(name, batch=16)
    found = simulate(model, args, machine=CPU)
    with torch.no_grad():
        model(*args)
        taken = taken_on_cpu(lambda: model(*args))
    assert found.peak_bytes == pytest.approx(found.memory.resident + taken, rel=0.05)


def test_memory_over_time():
    found = simulate(mlp(), inputs(), training=True)
    live = [kernel.live_bytes for kernel in found.kernels]
    assert max(live) <= found.memory.peak == max(moment.live for moment in found.memory.timeline)
    assert min(live) >= found.memory.resident


def test_models_larger_than_this_machine():
    found = simulate(
        nn.Linear(400_000, 400_000, device="meta"), torch.empty(1, 400_000, device="meta"), precision="fp16"
    )
    assert found.peak_bytes > 320e9 and not found.fits
    assert "does not fit: the machine has 141 GB" in str(found)
    assert simulate(mlp(), inputs()).fits


# ---- energy ----


def test_energy():
    found = simulate(mlp(4096), inputs(4096, 4096), mode="graph")
    assert found.joules == pytest.approx(found.seconds * H200.watts)
    idle = simulate(mlp(16), inputs(1, 16))
    busy = idle.device_seconds * H200.watts + (idle.seconds - idle.device_seconds) * H200.idle_watts
    assert idle.joules == pytest.approx(busy)
    unknown = dataclasses.replace(H200, watts=None)
    assert simulate(mlp(), inputs(), machine=unknown).joules is None


# ---- training ----


def test_a_training_step_is_forward_backward_and_update():
    run, step = simulate(mlp(), inputs(512), mode="graph"), simulate(mlp(), inputs(512), mode="graph", training=True)
    full = simulate(mlp(), inputs(512), mode="graph", optimizer=torch.optim.AdamW)
    phases = [list(dict.fromkeys(kernel.phase for kernel in found.kernels)) for found in (run, step, full)]
    assert phases == [["forward"], ["forward", "backward"], ["forward", "backward", "optimizer"]]
    assert run.seconds < step.seconds < full.seconds and run.peak_bytes < step.peak_bytes < full.peak_bytes
    weights = 4 * 2 * (1024 * 1024 + 1024)
    assert full.memory.optimizer_state == pytest.approx(2 * weights, rel=0.001)
    products = [sum(kernel.flops for kernel in found.kernels if kernel.kind == "matmul") for found in (run, step)]
    assert products[1] == pytest.approx(2.5 * products[0], rel=0.01)  # the input of the first needs no gradient


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_on_a_gpu_optimizers_work_on_all_parameters_at_once(optimizer):
    def updates(machine, make):
        found = simulate(mlp(64), inputs(1, 64), optimizer=make, machine=machine)
        return [kernel for kernel in found.kernels if kernel.phase == "optimizer"]

    assert all(kernel.operator.startswith("aten._foreach") for kernel in updates(H200, optimizer))
    assert not any("foreach" in kernel.operator for kernel in updates(CPU, optimizer))
    one_by_one = updates(H200, lambda parameters: optimizer(parameters, foreach=False))
    assert len(one_by_one) >= 4 and not any("foreach" in kernel.operator for kernel in one_by_one)
    assert "wait" not in {kernel.kind for kernel in one_by_one}  # the number of the step is on the host


def test_updates_move_the_bytes_of_all_weights_and_states():
    weights = 4 * 2 * (1024 * 1024 + 1024)
    found = simulate(mlp(), inputs(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), mode="graph")
    moved = sum(kernel.bytes for kernel in found.kernels if kernel.phase == "optimizer")
    assert moved == pytest.approx(3 * weights, rel=0.01)  # a weight and its gradient are read, the weight is written


# ---- what nothing is known about ----


class Decomposes(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x @ x)


def test_an_operator_without_a_formula_is_named_and_bounded_by_its_bytes():
    x = torch.empty(16, 256, 256, device="meta")
    found = simulate(Decomposes(), x, mode="graph")
    assert list(found.unknown) == ["aten._linalg_svd.default"]
    kernel = next(kernel for kernel in found.kernels if kernel.kind == "unknown")
    assert found.unknown["aten._linalg_svd.default"] == pytest.approx(kernel.seconds / found.device_seconds)
    assert kernel.bytes >= 4 * 16 * 256 * 256 and kernel.seconds >= kernel.memory >= kernel.bytes / (
        1.1 * H200.cache_bandwidth
    )
    share = f"{found.unknown['aten._linalg_svd.default']:.1%}"
    assert f"aten._linalg_svd.default: {share} of the device's time" in str(found) and "@flop_formula" in str(found)
    assert found.to_dict()["unknown"] == found.unknown and "_linalg_svd" in found._repr_html_()


def test_views_take_no_time_on_the_device():
    class Views(nn.Module):
        def forward(self, x):
            return x.t().unsqueeze(0).expand(3, -1, -1)[1:]

    found = simulate(Views(), inputs(64, 64))
    assert found.kernels == () and found.device_seconds == 0 < found.host_seconds
    assert found.seconds == pytest.approx(found.host_seconds)  # the same figures, added up in another order
    assert simulate(Views(), inputs(64, 64), mode="graph").seconds == 0


def test_reading_a_number_waits_for_the_device():
    class Reads(nn.Module):
        def forward(self, x):
            y = x @ x
            return y * 2 if y.sum().item() == 0 else y

    found = simulate(Reads(), torch.zeros(2048, 2048))
    waits = [kernel for kernel in found.kernels if kernel.kind == "wait"]
    assert len(waits) == 1 and waits[0].start > sum(k.seconds for k in found.kernels if k.kind == "matmul")
    last = found.kernels[-1]
    assert last.kind == "elementwise" and last.issued > waits[0].start


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_what_depends_on_values_is_run(precision):
    class Depends(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x[x[:, 0] > 0]) * x.sum().item()

    found = simulate(Depends(), torch.tensor([[1.0] * 4, [-1.0] * 4, [2.0] * 4]), precision=precision)
    assert [kernel.flops for kernel in found.kernels if kernel.kind == "matmul"] == [2 * 2 * 4 * 4]
    assert found.precision == (precision or "fp32")
    message = r"cannot run node '.*' without computing: .* not on the meta device, and the example is run"
    with pytest.raises(GraftError, match=message):
        simulate(torchgraft.symbolic_trace(lambda x: x.nonzero() + 1), torch.zeros(4, device="meta"))


# ---- mistakes ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machine": "h999"}, "there is no machine named 'h999'\nchoose one of "),
        ({"machine": "nowhere.toml"}, "cannot read the machine file 'nowhere.toml': No such file or directory"),
        ({"machine": ["h200"]}, "machine= is one machine, not several\nuse what_if("),
        ({"precision": "fp7"}, "there is no precision 'fp7'\nchoose one of fp64, fp32, tf32, bf16, fp16"),
        ({"mode": "quick"}, "there is no mode 'quick'\nchoose one of eager, graph, lowered"),
        ({"links": "nvlink"}, "links= is about several devices\ngive machines=, "),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(GraftError) as raised:
        simulate(mlp(), inputs(), **options)
    assert str(raised.value).startswith(message)


def test_a_precision_that_the_machine_lacks():
    old = dataclasses.replace(H200, name="an old one", peak={"fp32": 1e13, "fp16": 2e13})
    with pytest.raises(
        GraftError, match="an old one has no bf16\nit has fp32, fp16; choose one of these, or another machine"
    ):
        simulate(mlp(), inputs(), machine=old, precision="bf16")


# ---- one run for many questions ----


@settings(deadline=None, max_examples=20)
@given(st.floats(0.25, 4), st.floats(0.25, 4))
def test_a_run_is_timed_for_any_machine(bandwidth, compute):
    run = _RUN or _RUN.append(recorded(convolutions(), (IMAGES,), {}, H200, None, False)) or _RUN
    run[0].machine = dataclasses.replace(
        H200, bandwidth=H200.bandwidth * bandwidth, peak={name: rate * compute for name, rate in H200.peak.items()}
    )
    found = run[0].simulation("graph", False)
    best, worst = max(1.0, bandwidth, compute), min(1.0, bandwidth, compute)
    plain = simulate(convolutions(), IMAGES, mode="graph").seconds
    assert plain / best * 0.999 <= found.seconds <= plain / worst * 1.001


_RUN: list = []


@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "Rprop",
        "ASGD",
        "Adafactor",
    ],
)
@pytest.mark.parametrize("machine", ["h200", "epyc"])
def test_steps_of_all_optimizers(name, machine):
    model = mlp()
    step = simulate(model, inputs(), machine=machine, optimizer=getattr(torch.optim, name))
    plain = simulate(model, inputs(), machine=machine, training=True)
    assert step.seconds > plain.seconds and step.peak_bytes >= plain.peak_bytes and step.unknown == {}


def test_an_optimizer_that_runs_the_model_itself_is_refused():
    with pytest.raises(GraftError, match="LBFGS runs the model as often as it likes, by a closure"):
        simulate(mlp(), inputs(), optimizer=torch.optim.LBFGS)


def test_what_has_become_part_of_another_call_takes_no_time_on_a_cpu():
    class Chain(nn.Module):
        def forward(self, x):
            return (x + 1).relu() * 2

    graph, lowered = (
        simulate(Chain(), torch.ones(1, 4), machine="epyc_turin_1_thread", mode=mode) for mode in ("graph", "lowered")
    )
    assert [kernel.operator for kernel in lowered.kernels] == ["aten.mul.Tensor"]
    assert lowered.seconds < 0.6 * graph.seconds


def test_nothing_takes_no_longer_than_something():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)).eval()
    for mode in ("eager", "graph", "lowered"):
        none, one = (simulate(model, torch.ones(batch, 3, 8, 8), mode=mode) for batch in (0, 1))
        assert not none.kernels and none.seconds <= one.seconds


def test_an_optimizer_that_makes_none():
    with pytest.raises(
        GraftError, match="optimizer is 'Adam', and has to make one of parameters\ngive a class such as"
    ):
        simulate(nn.Linear(2, 2), torch.ones(1, 2), optimizer="Adam")
