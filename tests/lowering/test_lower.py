"""`lower`: programs in ATen and core ATen do what the program above does, with its guards, sizes and calls kept whole."""

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgraft
from tests.bridge.comparison import outcome
from tests.bridge.models import SMALL, Pair, Straight, small
from torchgraft import BridgeError, GuardError, Interpreter, Transformer, capture, zoo
from torchgraft.ir.guards import is_guard
from torchgraft.lowering.lower import lower
from torchgraft.lowering.tensors import TracedTensor

X = torch.randn(4, 6)
LEVELS = pytest.mark.parametrize("level", ["aten", "core_aten"])


def operators(program):
    names = [str(node.target) for node in program.graph.nodes]
    return [name for name in names if name.startswith("aten.")]


def assert_like(model, args, kwargs=None, level="aten"):
    """The program does what the model does: results, inputs, gradients, buffers; and so do its copies."""
    program = capture(model, args, kwargs, level=level)
    program.graph.lint()
    expected = outcome(model, args, kwargs)
    for copied in (program, copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        actual = outcome(copied, args, kwargs)
        for key, value in expected.items():
            # Decompositions may add up in another order.
            torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-5, msg=key)
    assert list(program.state_dict()) == list(model.state_dict())
    assert not program.meta["kept_calls"]
    return program


class Model(nn.Module):
    """A linear layer, a buffer, and whatever `run` does with them."""

    def __init__(self, run=lambda self, x: self.linear(x)):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("total", torch.zeros(6))
        self.widths = [6, 6]
        self.run = run

    def forward(self, x):
        return self.run(self, x)


# ---- the operators ----


def test_mlp_has_the_operators_of_its_levels():
    model, args = zoo.create("mlp").eval(), zoo.example_inputs("mlp")
    aten = capture(model, args, level="aten")
    assert operators(aten) == ["aten.linear.default", "aten.relu.default", "aten.linear.default"]
    core = capture(model, args, level="core_aten")
    linear = ["aten.permute.default", "aten.addmm.default"]
    assert operators(core) == [*linear, "aten.relu.default", *linear]
    for program in (aten, core):
        assert type(program).__name__ == "MLP"
        assert {node.target for node in program.graph.find_nodes(op="get_attr")} == set(model.state_dict())
        assert program.fc1.weight is model.fc1.weight
        text = program.print_readable(print_output=False)
        assert "# f32[1, 16]" in text and "x = self.relu(self.fc1(x))" in text


@pytest.mark.zoo
@LEVELS
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "learning_to_paint"])
def test_zoo_models(name, mode, level):
    model, args = small(name)
    model.train(mode == "train")
    assert_like(model, args, level=level)


CORE_TAG = torch.Tag.core


@pytest.mark.parametrize("name", ["mlp", "resnet18", "transformer"])
def test_core_programs_have_core_operators_only(name):
    model, args = small(name)
    program = capture(model.eval(), args, level="core_aten")
    found = {node.target for node in program.graph.nodes if str(node.target).startswith("aten.")}
    assert {str(item) for item in found if CORE_TAG not in item.tags} == set()


@LEVELS
@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
        lambda self, x: torch.einsum("ab,cb->ac", x, self.linear(x)),
        lambda self, x: F.gelu(self.linear(x)).mul_(2).relu_() + x.clone().add_(1),
        lambda self, x: x.new_zeros(x.shape[0], 3).index_fill_(0, torch.tensor([1]), 2.0),
        lambda self, x: F.pad(x, (1, 2)).unfold(1, 3, 2).flatten(1),
        lambda self, x: torch.stack([self.linear(row) for row in x.unbind()]).std(0),
        lambda self, x: F.scaled_dot_product_attention(x[None], x[None], self.linear(x)[None], is_causal=True),
        lambda self, x: F.scaled_dot_product_attention(self.linear(x)[None], x[None], x[None], torch.ones(4, 4).tril(-1) > 0),
        lambda self, x: F.multi_head_attention_forward(
            x[:, None], x[:, None], x[:, None], 6, 2, self.linear.weight.repeat(3, 1), None, None, None, False, 0.0,
            self.linear.weight, None,
        )[0],
        lambda self, x: x[x[:, 0] > 0].sum(),
        lambda self, x: x * x.max().item() + int(x.shape[0] * 1.5),
        lambda self, x: (x.t().contiguous().view(-1), x[::2, None], x.topk(2).indices, torch.linalg.norm(x)),
        lambda self, x: torch.cat([x.half().float(), x.to(torch.float64).to(x.dtype)]).type_as(x),
        lambda self, x: torch.complex(x, x).abs() + torch.fft.rfft(x).real.sum(),
    ],
    ids=[
        "interpolate", "einsum", "in place", "factory", "unfold", "rows", "attention", "hidden rows", "heads", "mask", "numbers",
        "views", "casts", "complex",
    ],
)  # fmt: skip
def test_functions(run, level):
    assert_like(Model(run), (X,), level=level)


@LEVELS
def test_layers(level):
    for layer in (
        nn.LSTM(6, 3, 2),
        nn.GRU(6, 3),
        nn.MultiheadAttention(6, 2),
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
    ):
        args = (X[None],) if not isinstance(layer, nn.MultiheadAttention) else (X[None], X[None], X[None])
        assert_like(layer.eval(), args, level=level)


@LEVELS
def test_batch_norm_trains(level):
    assert_like(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3)), (X,), level=level)


class Trees(nn.Module):
    def forward(self, x, pair, *, options, scale=2, nothing=None):
        options["b"].mul_(2)
        return {"y": x * scale + pair.first, "z": (options["a"] + options["b"], None, 5, [pair.second])}


@LEVELS
def test_trees_and_keywords(level):
    args = (torch.randn(3), Pair(torch.randn(3), torch.randn(3)))
    kwargs = {"options": {"a": torch.randn(3), "b": torch.randn(3)}, "scale": 3}
    program = assert_like(Trees(), args, kwargs, level)
    assert torch.equal(program(*args, **{**kwargs, "scale": 4})["y"], Trees()(*args, **{**kwargs, "scale": 4})["y"])


# ---- guards and sizes come along ----


@LEVELS
def test_guards_are_the_nodes_of_the_level_above(level):
    def run(self, x):
        return self.linear(x) if x.sum() > -1e9 and x.shape[0] < 100 else x

    program = capture(Model(run), (X,), level="function")
    lowered = lower(program, (X,), level=level)
    conditions = [str(guard) for guard in lowered.guards]
    assert {str(guard) for guard in program.guards} <= set(conditions)
    assert "x.shape[0] < 100" in lowered.explain()
    with pytest.raises(GuardError, match="x.shape\\[0\\] < 100"):
        lowered(torch.randn(100, 6))


@LEVELS
def test_sizes_stay_free(level):
    model = Model(lambda self, x: self.linear(x).view(x.shape[0], -1, self.widths[1] // 2).transpose(1, 2))
    program = capture(model, (X,), level=level)
    for batch in (1, 2, 9):
        x = torch.randn(batch, 6)
        torch.testing.assert_close(program(x), model(x))


@LEVELS
def test_a_size_that_is_asked_for_one_is_guarded(level):
    model = Model(lambda self, x: x * 10 if x.shape[0] == 1 else x)
    program = capture(model, (X,), level=level, dynamic={"x": [0]})
    torch.testing.assert_close(program(torch.ones(7, 6)), torch.ones(7, 6))
    with pytest.raises(GuardError, match="x.shape\\[0\\] == 1"):
        program(torch.ones(1, 6))


@LEVELS
def test_copies_of_graphs_keep_guards(level):
    program = capture(Model(lambda self, x: x if x.shape[0] > 2 else -x), (X,), level=level)
    graph = torchgraft.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    copied = torchgraft.GraphModule(program, graph)
    assert [node.target for node in graph.nodes if is_guard(node.target)]
    for run in (copied, Interpreter(program).run, Transformer(program).transform(), copy.deepcopy(program)):
        with pytest.raises(GuardError):
            run(torch.ones(2, 6))


def test_modes_flow_at_aten_and_are_checked_in_core():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).eval()
    aten, core = capture(model, (X,), level="aten"), capture(model, (X,), level="core_aten")
    for way in (aten, Interpreter(aten).run):
        aten.train()
        torch.manual_seed(0)
        actual = way(X)
        torch.manual_seed(0)
        torch.testing.assert_close(actual, copy.deepcopy(model).train()(X), atol=1e-4, rtol=1e-4)
    core.train()
    for way in (core, Interpreter(core).run):
        with pytest.raises(GuardError, match="training"):
            way(X)


def test_dtypes_flow_at_aten_and_are_checked_in_core():
    model = Model(lambda self, x: self.linear(x).softmax(-1) * torch.finfo(x.dtype).eps)
    aten, core = capture(model, (X,), level="aten"), capture(model, (X,), level="core_aten")
    expected = copy.deepcopy(model).double()(X.double())
    torch.testing.assert_close(copy.deepcopy(aten).double()(X.double()), expected)
    with pytest.raises(GuardError, match="lowered for the dtype torch.float32 of 'x', and now it is torch.float64"):
        copy.deepcopy(core).double()(X.double())


def test_ranks_are_checked():
    program = capture(Model(lambda self, x: self.linear(x)), (X,), level="aten")
    with pytest.raises(GuardError, match="lowered for 2 dimensions of 'x', and now it has 3"):
        program(X[None])


def test_autocast():
    model = Model()
    aten, core = capture(model, (X,), level="aten"), capture(model, (X,), level="core_aten")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(X)
        assert aten(X).dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(aten(X), expected)
        with pytest.raises(GuardError, match="lowered with autocast off"):
            core(X)
        under = capture(model, (X,), level="core_aten")
        torch.testing.assert_close(under(X), expected)
    inside = Model(lambda self, x: _cast(self, x))
    for level in ("aten", "core_aten"):
        torch.testing.assert_close(capture(inside, (X,), level=level)(X), inside(X))


def test_gradients_within_a_run_under_autocast_are_refused_with_their_line():
    def forces(x):
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            return torch.autograd.grad((at @ at.t()).sum(), at)[0]

    with torch.autocast("cpu", torch.bfloat16):
        assert capture(forces, (X,), level="aten")(X).shape == X.shape
        with pytest.raises(BridgeError, match=r"cannot lower 'grad' under autocast(.|\n)*torch.autograd.grad\(\(at @"):
            capture(forces, (X,), level="core_aten")


def _cast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = self.linear(x)
    return y.float() + self.linear(x)


# ---- what comes along, and what stays ----


@LEVELS
def test_nodes_know_where_they_come_from(level):
    program = capture(zoo.create("mlp"), zoo.example_inputs("mlp"), level="function")
    lowered = lower(program, zoo.example_inputs("mlp"), level=level)
    (relu,) = lowered.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert relu.meta["from_node"] == "relu" and list(relu.meta["nn_module_stack"]) == ["", "relu"]
    assert "self.relu(self.fc1(x))" in relu.stack_trace


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


@LEVELS
def test_what_is_kept_whole_stays_one_call(level):
    model = nn.Sequential(nn.Linear(6, 6), Counting(), nn.ReLU())
    program = capture(model, (X,), level=level)
    assert [node.target for node in program.graph.find_nodes(op="call_module")] == ["1"]
    assert "1" in program.meta["kept_whole"] and "kept as one call" in program.explain()
    assert model[1].calls == 0
    twin = copy.deepcopy(model)
    for _ in range(3):
        torch.testing.assert_close(program(X), twin(X))


@LEVELS
def test_leaves(level):
    program = capture(zoo.create("mlp"), zoo.example_inputs("mlp"), level=level, leaf="fc1")
    assert [node.target for node in program.graph.find_nodes(op="call_module")] == ["fc1"]


@LEVELS
def test_a_call_that_cannot_be_taken_apart_stays(level, monkeypatch):
    def sort(tensor):
        if type(tensor) is TracedTensor:
            raise RuntimeError("it wants memory")
        return tensor.sort().values

    sort.__module__ = "torch"  # only torch's own functions are looked into
    monkeypatch.setattr(torch, "sorted_values", sort, raising=False)
    program = capture(Model(), (X,), level="function")
    with program.graph.inserting_before(program.graph.output_node()):
        result = program.graph.call_function(sort, (program.graph.output_node().args[0],))
    program.graph.output_node().args = (result,)
    lowered = lower(program, (X,), level=level)
    assert lowered.meta["kept_calls"] == {result.name: "RuntimeError: it wants memory"}
    torch.testing.assert_close(lowered(X), program(X))


@LEVELS
def test_views_in_place_have_other_sizes(level):
    def run(self, x):
        y = self.linear(x).transpose_(0, 1)
        return y * y.shape[0] + y.unsqueeze_(0).shape[2]

    model = Model(run)
    program = assert_like(model, (X,), level=level)
    torch.testing.assert_close(program(X[:3]), model(X[:3]))


def test_an_lstm_is_one_operator():
    model, x = nn.LSTM(6, 5), torch.randn(3, 2, 6)
    program = capture(model, (x,), level="core_aten")
    assert operators(program) == ["aten.full.default"] * 2 + ["aten.lstm.input"]
    torch.testing.assert_close(program(torch.ones(7, 4, 6))[0], model(torch.ones(7, 4, 6))[0])


def test_functions_with_their_own_gradient_stay_one_call():
    model = Model(lambda self, x: Straight.apply(self.linear(x)))
    assert_like(model, (X,))


@LEVELS
def test_nothing_is_left_behind(level):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout())
    state, numbers, x = copy.deepcopy(model.state_dict()), torch.get_rng_state(), X.clone()
    capture(model, (x,), level=level)
    assert torch.equal(torch.get_rng_state(), numbers) and torch.equal(x, X)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


@LEVELS
def test_it_is_saved_and_loads_the_checkpoint_of_the_model(level):
    model = Model()
    program, file = capture(model, (X,), level=level), io.BytesIO()
    torch.save(program, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    other = Model()
    loaded.load_state_dict(other.state_dict())
    torch.testing.assert_close(loaded(X), other(X))


def test_lists_and_dicts_of_submodules():
    """torch.export leaves lists and dicts of submodules as other objects, which was taken for a write."""
    model = nn.Sequential(Model(lambda self, x: self.linear(x) * self.widths[0]))
    assert_like(model, (X,))


def test_wrong_levels():
    program = capture(Model(), (X,), level="function")
    with pytest.raises(ValueError, match='level must be "aten" or "core_aten", not "module"'):
        lower(program, (X,), level="module")


def test_meta_tensors():
    with torch.device("meta"):
        model, x = zoo.create("mlp", hidden_dim=1 << 20), torch.ones(2, 16)
    program = capture(model, (x,), level="aten")
    assert program(x).shape == (2, 16)


def test_threads():
    """Captures at several levels at once, and torch as it was afterwards."""
    failures = []

    def work(level):
        try:
            for _ in range(5):
                program = capture(zoo.create("mlp"), zoo.example_inputs("mlp"), level=level)
                program(*zoo.example_inputs("mlp"))
        except Exception as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(level,))
        for level in ("function", "aten", "core_aten", "joint")
        if level != "joint"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    torch.manual_seed(0)


@LEVELS
def test_gradients_stop_where_the_model_stops_them(level):
    def run(x, w):
        copied = torch.zeros_like(x)
        copied.copy_(x * w)
        return copied * 2, (x * w).detach()

    weight = torch.ones(X.shape[1], requires_grad=True)
    program = capture(run, (X, weight), level=level)
    copied, stopped = program(X, weight)
    assert not stopped.requires_grad
    copied.sum().backward()
    assert torch.allclose(weight.grad, 2 * X.sum(0))


def test_what_is_no_program_is_refused():
    with pytest.raises(
        TypeError, match="expected a captured program, got a Linear\n  capture\\(model, args, level='aten'\\)"
    ):
        lower(nn.Linear(6, 6), X)
    with pytest.raises(TypeError, match="loss must be a function of what the model returns, not 3"):
        torchgraft.capture_training(nn.Linear(6, 6), X, loss=3)


def test_modules_that_a_program_calls_stay_calls():
    lowered = lower(capture(nn.Sequential(nn.Linear(6, 6)), X), X)
    assert lowered.meta["kept_calls"] == {
        "_0": "the program calls a module; capture it at level 'function' to see inside"
    }


@pytest.mark.parametrize("level", ["aten", "core_aten"])
def test_a_constant_that_is_written_is_a_new_one_in_every_run(level: str) -> None:
    def count(x: torch.Tensor) -> torch.Tensor:
        seen = torch.tensor([0], device=x.device)
        seen += x.shape[0]
        return seen

    program = torchgraft.capture(count, torch.ones(3), level=level)
    assert [program(torch.ones(3)).item() for _ in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("level", ["aten", "core_aten"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.as_tensor([0.0, 0.1]),
        lambda x: torch.asarray([0.0, 0.1]),
        lambda x: x.new_tensor([0.0, 0.1]),
        lambda x: x.new_tensor([x.shape[0], 0.1]),
        lambda x: x.new_tensor([0.0, 0.1], dtype=torch.float64),
        lambda x: torch.tensor([0.1, 16777217.0, 1e300], dtype=torch.float64),
        lambda x: torch.tensor([0.1, 0.2], dtype=x.dtype),
    ],
)
def test_numbers_made_into_a_tensor_are_exact_and_new_in_every_run(level: str, make: Any) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        made = make(x)
        made += x.shape[0]
        return made

    program = torchgraft.capture(run, torch.ones(3), level=level)
    given = [torch.ones(3), torch.ones(4), torch.ones(3), torch.ones(3, dtype=torch.float64)]
    for x in given if level == "aten" else given[:3]:
        torch.testing.assert_close(program(x), run(x), rtol=0, atol=0)


def test_a_program_captured_in_inference_mode_has_gradients() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x[:, torch.tensor([0, 2])] * torch.tensor([0.5, 2.0])

    with torch.inference_mode():
        program = torchgraft.capture(run, torch.ones(2, 3), level="aten")
    x = torch.ones(2, 3, requires_grad=True)
    program(x).sum().backward()
    assert x.grad.tolist() == [[0.5, 0.0, 2.0]] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("level", ["aten", "core_aten"])
@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.tensor([0.5, 1.5]),
        lambda x: torch.tensor(0.25),
        lambda x: torch.zeros(2),
        lambda x: x.long() / 2,
    ],
    ids=["list", "number", "zeros", "division"],
)
def test_another_default_dtype_flows_or_is_refused(level: str, made: Any) -> None:
    program = torchgraft.capture(lambda x: (x, made(x)), torch.ones(3), level=level)
    torch.set_default_dtype(torch.float64)
    try:
        result = program(torch.ones(3, dtype=torch.float32))[1].dtype
    except torchgraft.GuardError as error:
        assert "torch.get_default_dtype() = torch.float32, and now it is torch.float64" in str(error)
    else:
        assert result is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "activation",
    [F.hardswish, F.relu6, F.silu, F.leaky_relu, F.mish, F.hardtanh, F.elu, F.hardsigmoid],
    ids=lambda f: f.__name__,
)
def test_activations_in_place_leave_no_write(activation):
    """Their decompositions copy into the input, which their own gradients need."""
    program = assert_like(Model(lambda self, x: activation(self.linear(x), inplace=True) * 2), (X,), level="core_aten")
    assert not any("_." in name for name in operators(program))
