"""`aten_program`: the operations of a level, run like the model, with its gradients, its state and its limits."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchgraft
from tests.bridge.comparison import assert_same_outcome, outcome
from tests.bridge.models import SMALL, Pair, Straight, small
from torchgraft import BridgeError, GuardError, Interpreter, Transformer, to_fx, zoo
from torchgraft.bridge.levels import aten_program

X = torch.randn(4, 6)
LEVELS = pytest.mark.parametrize("core", [False, True], ids=["aten", "core_aten"])


def operations(program):
    return [str(node.target) for node in program.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def assert_like(model, args, kwargs=None, core=False, dynamic=None):
    """The program does what the model does: results, inputs, gradients, buffers; and so do its copies."""
    program = aten_program(model, args, kwargs, core=core, dynamic=dynamic)
    program.graph.lint()
    expected = outcome(model, args, kwargs)
    actual = outcome(program, args, kwargs)
    assert_close(actual, expected)
    assert_same_outcome(outcome(copy.deepcopy(program), args, kwargs), actual)
    assert list(program.state_dict()) == list(model.state_dict())
    values = [node for node in program.graph.nodes if node.op != "get_attr" or not hasattr(program, "submod_1")]
    assert all("val" in node.meta for node in values)
    assert "class" in program.print_readable(print_output=False)
    return program


def assert_close(actual, expected):
    """Decompositions may add up in another order."""
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-5, msg=key)


class Model(nn.Module):
    """A linear layer, a buffer, and whatever `run` does with them."""

    def __init__(self, run=lambda self, x: self.linear(x)):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("total", torch.zeros(6))
        self.plain = torch.zeros(6)
        self.count = 0
        self.seen = []
        self.run = run

    def forward(self, x):
        return self.run(self, x)


# ---- the operations ----


def test_mlp_has_the_operations_of_its_levels():
    model, args = zoo.create("mlp").eval(), zoo.example_inputs("mlp")
    aten = aten_program(model, args)
    assert operations(aten) == ["aten.linear.default", "aten.relu.default", "aten.linear.default"]
    core = aten_program(model, args, core=True)
    assert operations(core) == [
        "aten.permute.default",
        "aten.addmm.default",
        "aten.relu.default",
        "aten.permute.default",
        "aten.addmm.default",
    ]
    for program in (aten, core):
        assert type(program).__name__ == "MLP"
        fetched = [node.target for node in program.graph.find_nodes(op="get_attr")]
        assert fetched == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
        assert program.fc1.weight is model.fc1.weight
        shapes = [tuple(node.meta["val"].shape) for node in program.graph.nodes if node.op == "call_function"]
        assert shapes[-1] == (1, 16)
        text = program.print_readable(print_output=False)
        assert "# f32[1, 16]" in text and "x = self.relu(self.fc1(x))" in text


@pytest.mark.zoo
@LEVELS
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "learning_to_paint"])
def test_zoo_models(name, mode, core):
    model, args = small(name)
    model.train(mode == "train")
    assert_like(model, args, core=core)


@LEVELS
def test_batch_norm_trains(core):
    program = assert_like(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3)), (X,), core=core)
    assert ("aten.clone.default" in operations(program)) == core


# ---- calls ----


class Trees(nn.Module):
    def forward(self, x, pair, *, options, scale=2, nothing=None):
        options["b"].mul_(2)
        return {"y": x * scale + pair.first, "z": (options["a"] + options["b"], None, 5, [pair.second])}


@LEVELS
def test_trees_and_keywords(core):
    args = (torch.randn(3), Pair(torch.randn(3), torch.randn(3)))
    kwargs = {"options": {"a": torch.randn(3), "b": torch.randn(3)}, "scale": 3}
    program = assert_like(Trees(), args, kwargs, core)
    with pytest.raises(GuardError, match="captured for scale == 3, and now scale is 4"):
        program(*args, **{**kwargs, "scale": 4})


class Varied(nn.Module):
    def forward(self, x, *others, **named):
        return x + others[0] + named["z"]


@pytest.mark.parametrize("dynamic", [None, "auto", {"z": [0], "others": ([0],), "x": [0]}], ids=str)
def test_any_number_of_inputs(dynamic):
    args, kwargs = (X, X + 1), {"z": X + 2}
    program = assert_like(Varied(), args, kwargs, dynamic=dynamic)
    if dynamic:
        assert program(*[torch.ones(7, 6)] * 2, z=torch.ones(7, 6)).shape == (7, 6)


def test_functions_and_methods():
    def double(x, y=None):
        return x * 2

    program = aten_program(double, (X,))
    assert torch.equal(program(X), X * 2) and type(program).__name__ == "double"
    model = Model()
    model.encode = None
    program = aten_program(model.linear.forward, (X,))
    assert torch.equal(program(X), model.linear(X)) and program.weight is model.linear.weight
    assert "forward" not in vars(model.linear)
    with pytest.raises(BridgeError, match="cannot capture a int"):
        aten_program(3, (X,))
    with pytest.raises(
        BridgeError, match=r"cannot capture the class Model; give a model that is made of it: Model\(...\)"
    ):
        aten_program(Model, (X,))


def test_one_input_need_not_be_in_a_tuple():
    assert aten_program(nn.ReLU(), X)(X).shape == X.shape


def test_a_program_of_ours_can_be_captured():
    traced = torchgraft.symbolic_trace(zoo.create("mlp"))
    program = aten_program(traced, zoo.example_inputs("mlp"))
    assert operations(program)[0] == "aten.linear.default"
    assert operations(aten_program(program, zoo.example_inputs("mlp"), core=True))[0] == "aten.permute.default"


# ---- limits of the program ----


def test_other_sizes_and_dtypes_are_refused():
    model = Model(lambda self, x: self.linear(x).view(4, 6) * 2)
    program = aten_program(model, (X,))
    with pytest.raises(GuardError, match=r"x.size\(\)\[0\] == 4, and now x.size\(\)\[0\] is 8; capture .*dynamic="):
        program(torch.randn(8, 6))
    with pytest.raises(GuardError, match="x.dtype == torch.float32"):
        program(X.double())
    with pytest.raises(GuardError):
        Interpreter(program).run(torch.randn(8, 6))


@LEVELS
@pytest.mark.parametrize(
    "dynamic", ["auto", {"x": [0]}, {"x": 0}, {"x": {0: "batch"}}, {"x": {0: torch.export.Dim.DYNAMIC}}], ids=str
)
def test_dimensions_that_stay_free(dynamic, core):
    model = Model(lambda self, x: self.linear(x).view(x.shape[0] * 2, -1) + 1)
    program = assert_like(model, (X,), core=core, dynamic=dynamic)
    for size in (3, 8):
        x = torch.randn(size, 6)
        torch.testing.assert_close(program(x), model(x))
    with pytest.raises(GuardError):
        program(torch.randn(4, 5))


def test_dimensions_of_nested_inputs():
    program = aten_program(lambda pair: pair.first * pair.second, (Pair(X, X + 1),), dynamic={"pair": Pair([0], [0])})
    assert program(Pair(torch.ones(5, 6), torch.ones(5, 6))).shape == (5, 6)
    program = aten_program(lambda pair: pair["a"] + 1, ({"a": X},), dynamic={"pair": {"a": {0: "n"}}})
    assert program({"a": torch.ones(5, 6)}).shape == (5, 6)


def test_a_dimension_that_cannot_stay_free():
    with pytest.raises(BridgeError, match=r"cannot capture Model: .*specialized"):
        aten_program(Model(lambda self, x: x.view(4, 6)), (X,), dynamic={"x": [0]})
    with pytest.raises(BridgeError, match="dynamic names 'y', but the inputs of Model are 'x'"):
        aten_program(Model(), (X,), dynamic={"y": [0]})
    with pytest.raises(BridgeError, match='dynamic takes "auto"'):
        aten_program(Model(), (X,), dynamic="all")


def test_equal_dimensions():
    model = type("Add", (nn.Module,), {"forward": lambda self, x, y: x + y})()
    program = aten_program(model, (X, X + 1), dynamic={"x": {0: "batch"}, "y": {0: "batch"}})
    assert program(torch.ones(9, 6), torch.ones(9, 6)).shape == (9, 6)
    with pytest.raises(GuardError):
        program(torch.ones(9, 6), torch.ones(8, 6))


def test_inputs_that_share_memory_now():
    def write(x, y):
        x.add_(1)
        return x * y

    base = torch.randn(4)
    aten, core = [aten_program(write, (torch.ones(4), torch.ones(4)), core=core) for core in (False, True)]
    assert torch.equal(aten(base.clone(), base), (base + 1) * base)
    shared = base.clone()
    assert torch.equal(aten(shared, shared), (base + 1) * (base + 1))
    with pytest.raises(GuardError, match=r"_is_alias_of\(x, y\)"):
        core(base, base)


def test_the_mode_matters_only_where_the_model_reads_it():
    program = aten_program(Model().eval(), (X,))
    assert program.train()(X).shape == X.shape
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout()).eval()
    program = aten_program(model, (X,))
    assert not program.training and torch.equal(program.eval()(X), model(X))
    with pytest.raises(GuardError, match="captured in evaluation mode, and it is now in training mode"):
        program.train()(X)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    program = aten_program(model, (X,))
    program.get_submodule("1").eval()
    with pytest.raises(GuardError, match="its submodule '1' is now in evaluation mode"):
        program(X)


def test_without_gradients():
    model = Model(lambda self, x: Straight.apply(self.linear(x)))
    with torch.no_grad():
        program = aten_program(model, (X,))
    with pytest.raises(GuardError, match="captured while gradients were off and computes none"):
        program(X)
    with torch.no_grad():
        assert torch.equal(program(X), model(X)) and torch.equal(Interpreter(program).run(X), model(X))


# ---- what torch.export would lose ----


def hooked(self, x):
    y = self.linear(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y


def inference(self, x):
    with torch.inference_mode():
        y = self.linear(x)
    return y.clone() + self.linear(x)


def count(self, x):
    self.count += 1
    return self.linear(x)


def remember(self, x):
    self.seen.append(x)
    return self.linear(x)


def replace(self, x):
    self.plain = self.plain + 1
    return self.linear(x) + self.plain


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda self, x: Straight.apply(self.linear(x)),
            "torch.autograd.Function Straight, which has a backward of its own",
        ),
        (lambda self, x: checkpoint(self.linear, x, use_reentrant=True), "torch.autograd.Function CheckpointFunction"),
        (hooked, r"puts a hook on a tensor at .*test_levels.py:\d+ \"y.register_hook"),
        (inference, "switches torch.inference_mode"),
        (count, "its forward writes self.count"),
        (remember, "its forward writes self.seen"),
        (replace, "its forward writes self.plain"),
    ],
    ids=["function", "checkpoint", "hook", "inference", "counter", "list", "tensor"],
)
def test_what_would_be_lost_is_refused(run, message):
    model = Model(run)
    before = {name: copy.copy(value) for name, value in vars(model).items()}
    with pytest.raises(BridgeError, match=message):
        aten_program(model, (X.clone().requires_grad_(),))
    assert vars(model).keys() == before.keys()
    assert model.count == 0 and model.seen == [] and torch.equal(model.plain, torch.zeros(6))


def test_backward_hooks_of_modules_are_refused():
    model = Model()
    model.linear.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(BridgeError, match="a backward hook on a module"):
        aten_program(model, (X,))


def accumulate(self, x):
    y = self.linear(x)
    self.total.add_(y.detach().sum(0))
    return y * 2


def assign(self, x):
    self.total = self.total + 1
    return self.linear(x) * self.total


def write_input(self, x):
    y = self.linear(x.clone())
    x.mul_(2)
    return y * x


def regions(self, x):
    with torch.no_grad():
        y = self.linear(x)
        with torch.enable_grad():
            z = self.linear(y)
        y = y + 1
    return y * self.linear(x) + z


def detached(self, x):
    y = self.linear(x)
    return y.detach() * self.linear(x).sin(), y.detach()


@LEVELS
@pytest.mark.parametrize(
    "run",
    [
        accumulate,
        write_input,
        assign,
        regions,
        detached,
        lambda self, x: checkpoint(self.linear, x, use_reentrant=False),
        lambda self, x: self.linear(x) * x.sum().item(),
        lambda self, x: self.linear(x).mul_(2).relu_(),
    ],
    ids=["buffer written", "input written", "buffer assigned", "no_grad", "detach", "checkpoint", "item", "in place"],
)
def test_effects(run, core):
    assert_like(Model(run), (X,), core=core)


@LEVELS
def test_recurrent_layers(core):
    assert_like(nn.LSTM(6, 3, 2), (X,), core=core)


@LEVELS
def test_hooks_run(core):
    model = Model()
    model.register_forward_hook(lambda module, inputs, result: result * 7)
    model.linear.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    program = aten_program(model, (X,), core=core)
    torch.testing.assert_close(program(X), model(X))


def test_the_model_is_left_as_it_was():
    model = Model(lambda self, x: F.dropout(self.linear(x)) + self.plain.add_(1) + self.total.add_(1))
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    aten_program(model, (X,))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(model.plain, torch.zeros(6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---- errors ----


def branch(self, x):
    if x.sum() > 0:
        return self.linear(x)
    return x


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (branch, r"Python needs the value of a tensor .*; at .*test_levels.py:\d+ \"if x.sum\(\) > 0:\"; rewrite"),
        (lambda self, x: torch.from_numpy(x.numpy()), r"numpy.*; at .*test_levels.py:\d+"),
        (
            lambda self, x: x @ x,
            r"cannot capture Model: .*; at .*test_levels.py:\d+ .*; give inputs that it takes, rewrite",
        ),
        (lambda self, x: self.nothing, "has no attribute 'nothing'"),
    ],
    ids=["branch", "numpy", "shapes", "attribute"],
)
def test_errors_say_what_and_where(run, message, capfd):
    with pytest.raises(BridgeError, match=message) as caught:
        aten_program(Model(run), (X,))
    assert len(str(caught.value)) < 700 and caught.value.__cause__ is not None


def test_inputs_that_do_not_fit():
    with pytest.raises(BridgeError, match="4 channels instead; give inputs that it takes, rewrite it"):
        aten_program(torch.nn.Conv2d(3, 4, 3), (torch.ones(1, 4, 8, 8),))
    with pytest.raises(BridgeError, match="cannot capture Model: .*argument"):
        aten_program(Model(), (X, X))
    with pytest.raises(BridgeError, match="missing a required argument: 'x'"):
        aten_program(Model(), (), dynamic={"x": [0]})


# ---- what can be done with the result ----


@LEVELS
def test_it_travels(core, tmp_path):
    model, args = zoo.create("mlp"), zoo.example_inputs("mlp", batch=3)
    program = aten_program(model, args, core=core)
    expected = model(*args)
    with pytest.warns(UserWarning, match="metadata 'val' of node .* cannot be pickled"):
        saved = pickle.dumps(program)
    theirs = to_fx(program)
    for copied in (pickle.loads(saved), copy.deepcopy(program), theirs, torchgraft.from_fx(theirs)):
        torch.testing.assert_close(copied(*args), expected)
        with pytest.raises(GuardError):
            copied(torch.randn(5, 16))
    torch.testing.assert_close(Transformer(program).transform()(*args), expected)
    torch.testing.assert_close(Interpreter(program).run(*args), expected)
    with pytest.raises(GuardError):
        Transformer(program).transform()(torch.randn(5, 16))


def test_it_is_traced_again_with_its_conditions():
    program = aten_program(Model(), (X,))
    again = torchgraft.symbolic_trace(program)
    assert torch.equal(again(X), program(X))
    with pytest.raises(AssertionError, match=r"x.size\(\)\[0\] == 4 does not hold"):
        again(torch.ones(5, 6))


def test_it_is_written_as_a_package(tmp_path, monkeypatch):
    program = aten_program(Model(), (X,))
    program.to_folder(tmp_path / "written", "Written")
    monkeypatch.syspath_prepend(tmp_path)
    from written import Written

    module = Written()
    assert torch.equal(module(X), program(X))
    with pytest.raises(GuardError):
        module(torch.ones(5, 6))


def test_it_can_be_edited():
    program = aten_program(zoo.create("mlp"), zoo.example_inputs("mlp"))
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.target = torch.ops.aten.neg.default
    program.graph.eliminate_dead_code()
    x = zoo.example_inputs("mlp")[0]
    first, second = program.fc1, program.fc2
    hidden = -F.linear(x, first.weight, first.bias)
    torch.testing.assert_close(program(x), F.linear(hidden, second.weight, second.bias))


def test_meta_weights_compute_nothing():
    with torch.device("meta"):
        model, x = zoo.create("mlp", hidden_dim=1 << 20), torch.ones(2, 16)
    program = aten_program(model, (x,), core=True)
    assert program.graph.output_node().meta["val"][0].shape == (2, 16)


def test_two_threads():
    results = {}

    def work(number):
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(number)])
        results[number] = len(operations(aten_program(model, (X,))))

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: 1, 3: 3}
