"""`joint_program` and `capture_training`: forward and backward as programs, with autograd's gradients and eager's state."""

import copy
import dataclasses
import itertools
import operator
import pickle
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchgraft
from tests.bridge.models import Straight, small
from torchgraft import BridgeError, GuardError, Interpreter, zoo
from torchgraft.lowering import joint
from torchgraft.lowering.training import capture_training, joint_program

X = torch.randn(4, 6)


def tensors(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def copied(tree):
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), tree)


def eager_step(model, args, kwargs, loss):
    """Results, gradients of parameters and inputs, and inputs after the call, as autograd has them; `model` is changed."""
    args, kwargs = copied((args, kwargs))
    torch.manual_seed(0)
    result = model(*args, **kwargs)
    result = result if loss is None else loss(result)
    sum(leaf.sum() for leaf in tensors(result) if leaf.requires_grad).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return (
        result,
        gradients,
        [leaf.grad for leaf in tensors((args, kwargs))],
        [leaf.detach() for leaf in tensors((args, kwargs))],
    )


def assert_trains_like(model, args, kwargs=None, loss=None):
    """The programs, run together, do what one step in eager does, and leave the model as it does."""
    kwargs = kwargs or {}
    twin = copy.deepcopy(model)
    state, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    programs = capture_training(model, args, kwargs, loss=loss)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same(model.state_dict(), state)
    result, gradients, _, inputs = eager_step(twin, args, kwargs, loss)
    args, kwargs = copied((args, kwargs))
    torch.manual_seed(0)
    step = programs.run(*args, **kwargs)
    assert_same(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result), step.results)
    assert_same({name: step.gradients[name] for name in gradients}, gradients)
    assert_same(model.state_dict(), twin.state_dict())
    assert_same([leaf.detach() for leaf in tensors((args, kwargs))], inputs)
    assert all(parameter.grad is None for parameter in model.parameters())
    for program in (programs.joint, programs.forward, programs.backward):
        assert_well_formed(program)
    return programs


def assert_same(actual, expected):
    ours, our_spec = pytree.tree_flatten(actual)
    theirs, their_spec = pytree.tree_flatten(expected)
    assert our_spec == their_spec
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        else:
            assert one == other


def assert_well_formed(program):
    program.graph.lint()
    operators = [
        node for node in program.graph.nodes if str(node.target).startswith("aten.") and "sym_" not in str(node.target)
    ]
    assert all("val" in node.meta for node in operators)
    assert f"class {type(program).__name__}" in program.print_readable(print_output=False)
    assert copy.deepcopy(program).code == program.code


class Model(nn.Module):
    """A linear layer, a buffer, and whatever `run` does with them."""

    def __init__(self, run=lambda self, x: self.linear(x)):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("total", torch.full((6,), 2.0))
        self.plain = torch.ones(6)
        self.caches = [torch.ones(6)]
        self.count = 0
        self.run = run

    def forward(self, x):
        return self.run(self, x)


# ---- whole models ----


@pytest.mark.zoo
@pytest.mark.parametrize("loss", [None, lambda y: y.pow(2).mean()], ids=["outputs", "loss"])
@pytest.mark.parametrize("name", ["mlp", "resnet18", "transformer"])
def test_zoo_models(name, loss):
    model, args = small(name)
    programs = assert_trains_like(model, args, loss=loss)
    buffers = [entry.name for entry in entries(programs.joint) if entry.kind == "update"]
    assert len(buffers) == (60 if name == "resnet18" else 0)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (nn.LSTM(6, 3, 2), (X,)),
        (nn.GRU(6, 3), (X,)),
        (nn.MultiheadAttention(6, 2), (X, X + 1, X + 2)),
        (nn.TransformerEncoderLayer(6, 2, 8), (X,)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), (X,)),
        (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (torch.randn(2, 3, 8, 8),)),
        (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.ReLU(inplace=True)), (X,)),
    ],
    ids=["lstm", "gru", "attention", "encoder", "weight norm", "channels last", "batch norm"],
)
def test_layers(model, args):
    assert_trains_like(model, args)


class Packed(nn.Module):
    """A recurrent layer on texts of several lengths."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x * 2, lengths, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])[0]


def test_packed_sequences():
    model, args = Packed(), (torch.randn(4, 3, 6), torch.tensor([2, 4, 3]))
    step = torchgraft.capture_training(model, args, loss=lambda y: y.pow(2).sum()).run(*args)
    model(*args).pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad)
    assert torchgraft.cost(model, args, compute=True).forward.flops > 0


class Structures(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x, *, options, scale=2.0, text="a"):
        y = self.norm(self.frozen(self.two(self.one(x)))) * scale
        return {"y": y, "more": (y.sum(), y.argmax(), None, text, [options["bias"] + y])}


def test_structures_shared_unused_and_frozen_parameters():
    programs = assert_trains_like(Structures(), (X,), {"options": {"bias": torch.randn(6)}, "scale": 3.0})
    kinds = {entry.kind for entry in entries(programs.joint)}
    assert kinds == {"result", "update", "gradient"}
    gradients = programs.run(X, options={"bias": torch.randn(6)}, scale=3.0).gradients
    assert gradients["unused.weight"] is None and gradients["frozen.weight"] is None
    assert "two.weight" not in gradients and gradients["one.weight"] is not None


def test_inputs_have_gradients_too():
    programs = capture_training(Model(), (X.clone().requires_grad_(),))
    model, x = Model(), X.clone().requires_grad_()
    programs = capture_training(model, (x,))
    _, _, (expected,), _ = eager_step(copy.deepcopy(model), (x,), {}, None)
    assert_same(programs.run(x).gradients["x"], expected)


def test_functions_and_methods():
    weight = torch.randn(6, requires_grad=True)
    programs = capture_training(lambda w, x: w * x, (weight, X))
    assert_same(programs.run(weight, X).gradients, {"w": X.sum(0)})
    model = Model()
    assert list(capture_training(model.linear.forward, (X,)).run(X).gradients) == ["weight", "bias"]


def test_one_tensor_given_twice():
    x = X.clone().requires_grad_()
    gradients = capture_training(lambda a, b: a * b.sin(), (x, x)).run(x, x).gradients
    (total,) = torch.autograd.grad((x * x.sin()).sum(), x)
    assert_same(sum(gradients.values()), total)


# ---- the joint program ----


def entries(program):
    return program.graph.output_node().meta["entries"]


def origins(program):
    nodes = program.graph.find_nodes(op="placeholder")
    return [(node.name, node.meta["origin_kind"], node.meta["origin_name"]) for node in nodes]


def test_names_and_marks_of_the_joint_program():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    program = joint_program(model, (X,))
    assert origins(program) == [
        ("primals_1", "parameter", "0.weight"),
        ("primals_2", "parameter", "0.bias"),
        ("primals_3", "parameter", "1.weight"),
        ("primals_4", "parameter", "1.bias"),
        ("primals_5", "buffer", "1.running_mean"),
        ("primals_6", "buffer", "1.running_var"),
        ("primals_7", "buffer", "1.num_batches_tracked"),
        ("primals_8", "input", "input"),
        ("tangents_1", "tangent", "result"),
    ]
    assert [tuple(entry) for entry in entries(program)] == [
        ("result", "result"),
        ("update", "1.running_mean"),
        ("update", "1.running_var"),
        ("update", "1.num_batches_tracked"),
        ("gradient", "0.weight"),
        ("gradient", "0.bias"),
        ("gradient", "1.weight"),
        ("gradient", "1.bias"),
    ]
    assert [tuple(value.shape) for value in program.graph.output_node().meta["val"]][:2] == [(4, 5), (5,)]
    assert not program.state_dict()


def test_the_joint_program_runs():
    model = Model()
    programs = capture_training(model, (X,))
    tangent = torch.randn(4, 6)
    values = programs.joint(*programs.primals(X), tangent)
    named = {entry.name: value for entry, value in zip(entries(programs.joint), values, strict=True)}
    expected = torch.autograd.grad(model(X), list(model.linear.parameters()), tangent)
    assert_same([named["linear.weight"], named["linear.bias"]], list(expected))
    assert_same(Interpreter(programs.joint).run(*programs.primals(X), tangent), values)
    assert_same(programs.run(X, tangents=[tangent]).gradients["linear.bias"], expected[1])


def test_a_loss_has_one_tangent():
    target = torch.tensor([0, 1, 2, 3])
    program = joint_program(Model(), (X,), loss=lambda y: F.cross_entropy(y, target))
    assert [name for name, kind, _ in origins(program) if kind == "tangent"] == ["tangents_1"]
    assert tuple(entries(program)[0]) == ("result", "loss")
    assert program.graph.find_nodes(op="placeholder")[-1].meta["val"].shape == ()


class WeightedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, y):
        return (y * self.weight).sum()


def test_a_loss_with_parameters():
    model, loss = Model(), WeightedLoss()
    gradients = capture_training(model, (X,), loss=loss).run(X).gradients
    assert_same(gradients["loss.weight"], model(X).sum(0).detach())


@pytest.mark.parametrize("loss", [lambda y: y, lambda y: 3.0], ids=["matrix", "number"])
def test_a_loss_that_is_no_scalar(loss):
    with pytest.raises(BridgeError, match="loss must give a tensor with one element, not"):
        capture_training(Model(), (X,), loss=loss)


def test_lines_and_modules_of_nodes():
    program = joint_program(zoo.create("mlp"), zoo.example_inputs("mlp"))
    text = program.print_readable(print_output=False)
    assert "x = self.relu(self.fc1(x))" in text and "# f32[1, 32]" in text
    node = program.graph.find_nodes(op="call_function", target=torch.ops.aten.threshold_backward.default)[0]
    assert "self.relu(self.fc1(x))" in node.stack_trace
    assert list(node.meta["nn_module_stack"]) == ["", "relu"]


# ---- forward and backward ----


def test_forward_and_backward_share_only_what_is_saved():
    programs = capture_training(zoo.create("mlp"), zoo.example_inputs("mlp", batch=3))
    assert origins(programs.forward) == origins(programs.joint)[:-1]
    saved = [entry.name for entry in entries(programs.forward) if entry.kind == "saved"]
    assert saved == ["primals_3", "primals_5", "relu"]
    assert [name for name, _, _ in origins(programs.backward)] == [*saved, "tangents_1"]
    assert [entry.kind for entry in entries(programs.backward)] == ["gradient"] * 4
    targets = [node.target for node in programs.forward.graph.nodes]
    assert torch.ops.aten.threshold_backward.default not in targets
    assert dataclasses.is_dataclass(programs) and "forward=" in repr(programs)


def test_nothing_expensive_is_computed_twice():
    model, args = small("transformer")
    programs = capture_training(model, args)
    heavy = ("mm", "addmm", "bmm", "native_layer_norm", "native_dropout", "_softmax", "gelu", "embedding")

    def count(program):
        return sum(getattr(node.target, "_opname", "") in heavy for node in program.graph.nodes)

    assert count(programs.forward) + count(programs.backward) == count(programs.joint)


def test_a_saved_buffer_is_read_before_it_is_written():
    def run(self, x):
        y = self.linear(x) * self.total.clone()
        self.total.add_(1)
        return y

    assert_trains_like(Model(run), (X,))


def test_training_for_some_steps():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    programs = capture_training(model, (X,), loss=lambda y: y.pow(2).mean())
    ours, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(3):
        step = programs.run(X)
        for name, parameter in model.named_parameters():
            parameter.grad = step.gradients[name]
        ours.step()
        theirs.zero_grad()
        twin(X).pow(2).mean().backward()
        theirs.step()
    assert_same(model.state_dict(), twin.state_dict())


# ---- effects ----


def count(self, x):
    self.count += 1
    return self.linear(x)


def grow(self, x):
    self.total = torch.cat([self.total, self.total])
    return self.linear(x)


def hooked(self, x):
    y = self.linear(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y * 2


def inner_gradient(self, x):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(self.linear(x).pow(3).sum(), x, create_graph=True)
    return gradient


def regions(self, x):
    with torch.no_grad():
        y = self.linear(x)
    return y * self.linear(x) + self.linear(x).detach()


def assign(self, x):
    self.total = self.total + 1
    return self.linear(x) * self.total


def write(self, x):
    self.total.add_(1)
    self.plain.mul_(2)
    self.caches[0].add_(1)
    return self.linear(x) * self.total * self.plain * self.caches[0]


def write_parameter(self, x):
    with torch.no_grad():
        self.linear.weight.mul_(0.5)
    return self.linear(x)


def write_input(self, x):
    x.mul_(2)
    return self.linear(x)


def constants(self, x):
    return self.linear(x) * torch.tensor([1.0, 2, 3, 4, 5, 6]) + CONSTANT


CONSTANT = torch.randn(6)


@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: Straight.apply(self.linear(x)),
        inner_gradient,
        regions,
        write,
        write_parameter,
        write_input,
        constants,
        lambda self, x: checkpoint(lambda x: self.linear(x).relu(), x, use_reentrant=False),
        lambda self, x: F.dropout(self.linear(x), 0.3) + torch.rand_like(x),
        lambda self, x: (x, self.linear.weight, self.linear(x).t(), self.linear.weight.view(-1)),
        lambda self, x: [y := self.linear(x), y, y.t(), y[0]],
    ],
    ids=[
        "function", "inner gradient", "regions", "write", "write parameter", "write input", "constants", "checkpoint", "random",
        "aliases of inputs", "aliases of results",
    ],
)  # fmt: skip
def test_effects(run):
    model = Model(run)
    twin = copy.deepcopy(model)
    assert_trains_like(model, (X,))
    eager_step(twin, (X,), {}, None)
    assert_same((model.plain, model.caches), (twin.plain, twin.caches))


def test_gradients_may_be_off_around_the_capture():
    model = Model()
    for switch in (torch.no_grad, torch.inference_mode):
        with switch():
            gradients = capture_training(model, (X,)).run(X).gradients
        assert_same(gradients["linear.bias"], torch.full((6,), 4.0))


@pytest.mark.parametrize(
    "run",
    [count, grow, assign, hooked, lambda self, x: torch.vmap(self.linear)(x)],
    ids=["counter", "shape", "assign", "hook", "vmap"],
)
def test_models_kept_whole(run):
    model = Model(run)
    twin = copy.deepcopy(model)
    programs = assert_trains_like(model, (X,))
    eager_step(twin, (X,), {}, None)
    assert (model.count, model.total.shape) == (twin.count, twin.total.shape)
    twin.zero_grad()
    more = torch.randn(9, 6)
    assert_same(programs.run(more).gradients, eager_step(twin, (more,), {}, None)[1])


# ---- refusals ----


def branch(self, x):
    return self.linear(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda self, x: self.linear(x).detach(), "no result depends on a parameter or input that requires a gradient"),
        (lambda self, x: object(), "it returns object, in which there are no tensors"),
    ],
    ids=["nothing", "object"],
)
def test_refusals(run, message):
    model = Model(run)
    before = dict(vars(model))
    with pytest.raises(BridgeError, match=message):
        capture_training(model, (X,))
    assert all(vars(model)[name] is value for name, value in before.items())
    assert isinstance(model.linear.weight, nn.Parameter) and model.total.shape == (6,)


class Asking(nn.Linear):
    """Asks gradients for a value of its own, as speech models do so that parts can be computed again in the backward."""

    def forward(self, x, own=True):
        inner = x[:, None] if own else x.to(x.dtype)
        inner.requires_grad = True
        return super().forward(inner * 2).exp()


def test_a_value_of_its_own_may_be_asked_gradients_for():
    model = Asking(6, 3)
    programs = capture_training(model, (X,))
    _, expected, _, _ = eager_step(model, (X,), {}, None)
    torch.testing.assert_close(dict(programs.run(X).gradients), expected)
    with pytest.raises(BridgeError, match="it writes requires_grad of a tensor"):
        capture_training(Asking(6, 3), (X.clone(), False))


def test_a_hook_on_a_parameter_is_refused():
    model = Model()
    handle = model.linear.weight.register_hook(lambda gradient: gradient * 3)
    with pytest.raises(BridgeError, match="'linear.weight' has a hook that changes its gradient"):
        capture_training(model, (X,))
    handle.remove()
    assert_trains_like(model, (X,))


SIZES_OF_ONE = {
    "mean": (lambda x: x.mean((2, 3)), (1, 3, 1, 5), (2, 3, 4, 6)),
    "pool": (lambda x: F.adaptive_avg_pool2d(x, 1), (1, 3, 1, 1), (2, 3, 4, 5)),
    "cat": (lambda x: torch.cat([x, x * 2]), (1, 4), (3, 4)),
    "gate": (lambda x: x * F.conv2d(x.mean((2, 3), keepdim=True), torch.ones(3, 3, 1, 1)), (1, 3, 1, 1), (2, 3, 4, 5)),
    "product": (lambda x: x.view(-1, 1, 4) * x, (1, 4), (3, 4)),
    "rows": (lambda x: x @ x.transpose(-1, -2), (1, 1, 4), (2, 3, 4)),
    "index_add": (
        lambda x: x.new_zeros(2, 4).index_add(0, torch.zeros(x.shape[0], dtype=torch.long), x),
        (1, 4),
        (3, 4),
    ),
    "lstm": (
        lambda x: torch.lstm(x, [x.new_zeros(1, x.shape[0], 2)] * 2, WEIGHTS, True, 1, 0.0, False, False, True)[0],
        (1, 3, 4),
        (2, 5, 4),
    ),
}
WEIGHTS = [torch.randn(8, 4), torch.randn(8, 2), torch.randn(8), torch.randn(8)]


@pytest.mark.parametrize("name", SIZES_OF_ONE)
def test_sizes_of_one_stay_free(name):
    run, first, second = SIZES_OF_ONE[name]
    programs = capture_training(run, (torch.randn(first, requires_grad=True),))
    x = torch.randn(second, requires_grad=True)
    expected = run(x)
    gradient = torch.autograd.grad(expected.sum(), x)[0]
    step = programs.run(x)
    assert_same(step.results, expected.detach())
    assert_same(step.gradients["x"], gradient)


@pytest.mark.parametrize(
    "shapes", list(itertools.product([(4, 1, 5), (1, 4, 5), (1, 1, 1), (1,), ()], [(4, 4, 5), (4, 1, 5), (1, 5)]))
)
@pytest.mark.parametrize(
    "run",
    [
        lambda x, y: (x * y).sum(),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: x.expand(torch.broadcast_shapes(x.shape, y.shape)) * y,
        lambda x, y: torch.addmm(x.reshape(-1)[:1], torch.ones(2, 3), torch.ones(3, 5)) * y.sum(),
    ],
    ids=["product", "where", "expand", "addmm"],
)
def test_what_is_broadcast_has_its_gradient_and_is_guarded(run, shapes):
    x, y = (torch.randn(shape, requires_grad=True) for shape in shapes)
    programs = capture_training(run, (x, y))
    expected = run(x, y)
    gradients = torch.autograd.grad(expected.sum(), (x, y))
    assert_same(dict(programs.run(x, y).gradients), dict(zip("xy", gradients, strict=True)))
    # Of other sizes, the same or a refusal.
    x, y = (torch.randn([size + 1 for size in shape], requires_grad=True) for shape in shapes)
    try:
        expected = run(x, y)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            programs.run(x, y)
        return
    try:
        found = programs.run(x, y)
    except GuardError:
        return
    assert_same(dict(found.gradients), dict(zip("xy", torch.autograd.grad(expected.sum(), (x, y)), strict=True)))


def test_branches_are_guarded():
    programs = capture_training(Model(branch), (X.abs(),))
    programs.run(X.abs())
    with pytest.raises(GuardError, match="if x.sum\\(\\) > 0"):
        programs.run(-X.abs())


def test_other_sizes_run():
    model = Model()
    programs = capture_training(model, (X,))
    more = torch.randn(9, 6)
    assert_same(programs.run(more).gradients["linear.bias"], torch.full((6,), 9.0))


@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: F.rms_norm(self.linear(x), (6,), self.total),
        lambda self, x: F.group_norm(self.linear(x), 2),
        lambda self, x: F.group_norm(self.linear(x)[:, :, None, None].expand(-1, -1, 2, 3), 3, self.total, self.total),
        lambda self, x: F.interpolate(self.linear(x)[None], scale_factor=2.0),
        lambda self, x: F.interpolate(self.linear(x)[None, None], size=(4, 5), mode="bicubic"),
        lambda self, x: torch.cat([part * 2 for part in self.linear(x).chunk(2, 1)], 1),
        lambda self, x: self.linear(x) * sum(x[0].tolist()),
        lambda self, x: torch.cat(self.linear(x).split(torch.tensor([2, 4]).tolist(), 1), 1),
        lambda self, x: (y := self.linear(x)) * F.adaptive_avg_pool1d(y[None], 1)[0],
        lambda self, x: self.linear(x)[:, :4].transpose_(0, 1) * x.shape[0],
        lambda self, x: F.cross_entropy(self.linear(x), torch.zeros(x.shape[0], dtype=torch.long)),
    ],
    ids=["rms", "group", "group 4d", "nearest", "bicubic", "chunk", "tolist", "split", "gate", "transpose_", "loss"],
)
def test_sizes_stay_free(run):
    """Another batch, and a batch of one, give what the model gives; nothing is refused."""
    model = Model(run)
    programs = capture_training(model, (X,))
    for x in (torch.randn(9, 6), torch.randn(1, 6)):
        model.zero_grad()
        expected = model(x)
        expected.sum().backward()
        step = programs.run(x)
        torch.testing.assert_close(step.results, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(step.gradients["linear.weight"], model.linear.weight.grad, rtol=1e-4, atol=1e-5)


def test_spectra():
    assert_trains_like(Model(lambda self, x: torch.stft(self.linear(x), 4, return_complex=True).abs()), (X,))


def test_dropout_between_layers():
    for layer in (nn.LSTM, nn.GRU, nn.RNN):
        assert_trains_like(layer(6, 3, 2, dropout=0.5), (X,))
        assert_trains_like(layer(6, 3, 2, dropout=0.5).eval(), (X,))


def test_views_of_one_tensor_that_are_written():
    base = torch.randn(4, 6)

    def run(a, b, weight):
        a.add_(1)
        return (a + b) * weight

    args = (base[:2], base[1:3], torch.ones(6, requires_grad=True))
    with pytest.raises(BridgeError, match="'a' and 'b' share memory, and one of them is written"):
        capture_training(run, args)
    model = Model(lambda self, x: self.linear(x) * self.total.add_(1) * self.part)
    model.register_buffer("part", model.total[:1])
    with pytest.raises(BridgeError, match="'total' and 'part' share memory, and one of them is written"):
        capture_training(model, (X,))


def test_inputs_that_share_memory_now():
    def run(a, b):
        a.add_(1)
        return a * b

    weight = torch.ones(6, requires_grad=True)
    programs = capture_training(run, (torch.ones(6), weight))
    programs.run(torch.ones(6), weight)
    with pytest.raises(GuardError, match="write 'a', which shares memory with 'b' now"):
        programs.run(weight.detach(), weight)


def test_other_inputs_are_refused():
    programs = capture_training(Structures(), (X,), {"options": {"bias": torch.randn(6)}})
    options = {"bias": torch.randn(6)}
    with pytest.raises(GuardError, match="lowered for the dtype torch.float32 of 'x', and now it is torch.float64"):
        programs.run(X.double(), options=options)
    with pytest.raises(GuardError, match="expected a dict for 'options', got a list"):
        programs.run(X, options=[options["bias"]])
    with pytest.raises(GuardError, match="missing a required"):
        programs.run(options=options)
    with pytest.raises(GuardError, match=r"run\(\) got 1 tangents, and the program takes 3: result\['y'\]"):
        programs.run(X, options=options, tangents=[X])
    programs = capture_training(Structures(), (X,), {"options": options, "text": "b"})
    with pytest.raises(GuardError, match="text"):
        programs.run(X, options=options, text="c")


@dataclasses.dataclass
class Record(OrderedDict):
    """A result as transformers has it: a dict that is a dataclass, which torch is told how to take apart."""

    hidden: torch.Tensor
    pooled: torch.Tensor

    def __post_init__(self):
        self.update(hidden=self.hidden, pooled=self.pooled)


pytree.register_pytree_node(
    Record,
    lambda record: (list(record.values()), list(record)),
    lambda values, names: Record(**dict(zip(names, values, strict=True))),
    serialized_type_name="tests.lowering.Record",
    flatten_with_keys_fn=lambda record: (
        [(pytree.MappingKey(name), value) for name, value in record.items()],
        list(record),
    ),
)


def test_results_of_libraries():
    model = Model(lambda self, x: Record(self.linear(x), self.linear(x).mean(1)))
    assert capture_training(model, (X,)).joint.graph.output_node().meta["entries"][:2] == [
        ("result", "result['hidden']"),
        ("result", "result['pooled']"),
    ]
    step = capture_training(model, (X,)).run(X)
    assert type(step.results) is Record
    torch.testing.assert_close(step.results.pooled, model(X).pooled)
    sum(value.sum() for value in model(X).values()).backward()
    torch.testing.assert_close(step.gradients["linear.weight"], model.linear.weight.grad)


def test_seeding_is_part_of_the_program():
    def seeded(x):
        torch.manual_seed(0)
        return x * torch.rand(6)

    def restored(x):
        state = torch.get_rng_state()
        y = x * torch.rand(6)
        torch.set_rng_state(state)
        return y

    weight = torch.ones(6, requires_grad=True)
    for run in (seeded, restored):
        programs = capture_training(run, (weight,))
        torch.manual_seed(3)
        expected, state = run(weight), torch.get_rng_state()
        torch.manual_seed(3)
        torch.testing.assert_close(programs.run(weight).results, expected)
        assert torch.equal(torch.get_rng_state(), state)


def test_another_default_dtype_is_refused():
    def run(x):
        return x * (2 if torch.get_default_dtype() == torch.float32 else 3)

    weight = torch.ones(6, requires_grad=True)
    programs = capture_training(run, (weight,))
    torch.testing.assert_close(programs.run(weight).results, 2 * weight)
    try:
        torch.set_default_dtype(torch.float64)
        with pytest.raises(GuardError, match=r"get_default_dtype\(\) = torch.float32, and now it is torch.float64"):
            programs.run(weight)
    finally:
        torch.set_default_dtype(torch.float32)


def test_every_guard_knows_its_line():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
    guards = joint_program(model, (X,)).guards
    assert guards and all("unknown" not in guard.where for guard in guards)


def test_another_mode_is_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout())
    programs = capture_training(model, (X,))
    programs.program.eval()
    with pytest.raises(GuardError, match="captured for 1.training = True, and now it is False"):
        programs.run(X)
    capture_training(Model(), (X,)).run(X)


def test_inputs_that_do_not_fit():
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        capture_training(Model(), (X, X))


# ---- what can be done with the programs ----


def test_they_travel():
    programs = capture_training(zoo.create("mlp"), zoo.example_inputs("mlp"))
    x = zoo.example_inputs("mlp")[0]
    primals = programs.primals(x)
    for program in (programs.joint, programs.forward):
        again = pickle.loads(pickle.dumps(program))
        inputs = primals if program is programs.forward else [*primals, torch.ones(1, 16)]
        assert_same(again(*inputs), program(*inputs))
        assert entries(again) == entries(program) and origins(again) == origins(program)
        assert_same(torchgraft.to_fx(program, nested=True)(*inputs), program(*inputs))
    assert_same(copy.deepcopy(programs).run(x).gradients, programs.run(x).gradients)


def test_they_can_be_edited():
    model = zoo.create("mlp")
    programs = capture_training(model, zoo.example_inputs("mlp"))
    (node,) = programs.joint.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    node.target = torch.ops.aten.tanh.default
    x = zoo.example_inputs("mlp")[0]
    result = programs.joint(*programs.primals(x), torch.ones(1, 16))[0]
    assert_same(result, model.fc2(torch.tanh(model.fc1(x))).detach())


def test_meta_weights_compute_nothing():
    with torch.device("meta"):
        model, x = zoo.create("mlp", hidden_dim=1 << 20), torch.ones(2, 16)
    program = joint_program(model, (x,))
    assert program.graph.output_node().meta["val"][1].shape == (1 << 20, 16)


def test_several_threads():
    results = {}

    def work(number):
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(number)])
        results[number] = len(capture_training(model, (X,)).run(X).gradients)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: 2, 2: 4, 3: 6}


class Cache:
    """An object that torch's pytree does not know."""

    def __init__(self, keys, length):
        self.keys, self.length = keys, length


@dataclasses.dataclass
class Output:
    cache: Cache
    length: int


class ReturnsObjects(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x):
        keys = x * 2
        return self.linear(x), Output(Cache([keys], x.shape[0] + 1), x.shape[0])


def test_results_that_are_objects_hold_the_values_of_each_run():
    model = ReturnsObjects()
    programs = capture_training(model, (X,))
    for x in (torch.randn(4, 6), torch.randn(9, 6)):
        (logits, found), (expected_logits, expected) = programs.run(x).results, model(x)
        assert torch.equal(logits, expected_logits)
        assert torch.equal(found.cache.keys[0], expected.cache.keys[0])
        assert (found.cache.length, found.length) == (len(x) + 1, len(x))
        assert (type(found), type(found.length)) == (Output, int)


def test_what_an_object_holds_has_no_tangent():
    programs = capture_training(ReturnsObjects(), (X,))
    nodes = programs.joint.graph.find_nodes(op="placeholder")
    assert len([node for node in nodes if node.meta["origin_kind"] == "tangent"]) == 1


def test_sizes_among_the_results_are_those_of_each_run():
    programs = capture_training(lambda x, w: (x @ w, x.shape[0] * 2), (X, torch.randn(6, 1, requires_grad=True)))
    assert programs.run(torch.randn(7, 6), torch.randn(6, 1)).results[1] == 14


def test_parts_of_results_belong_to_what_computes_them() -> None:
    """They are first needed in another module, in the backward, or behind it."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    program = joint_program(model, (torch.ones(2, 4),))
    parts = [node for node in program.graph.nodes if node.target is operator.getitem]
    assert {(part.args[0].target, part.args[1]) for part in parts} >= {
        *((torch.ops.aten.native_layer_norm.default, index) for index in (0, 1, 2)),
        *((torch.ops.aten.native_layer_norm_backward.default, index) for index in (1, 2)),
    }
    for part in parts:
        for key in ("nn_module_stack", "partitioner_tag", "from_node"):
            assert part.meta.get(key) == part.args[0].meta.get(key), (part, key)


def test_a_program_with_modules_is_taken_apart() -> None:
    """Modules that are still whole can change their mode, so that a program captured for evaluation can be trained."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    program = torchgraft.capture(model, (torch.ones(3, 4),)).train()
    joint = joint_program(program, (torch.ones(3, 4),))
    updates = [entry.name for entry in joint.graph.output_node().meta["entries"] if entry.kind == "update"]
    assert updates == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    program.eval()


def test_a_product_that_is_written_afterwards():
    def attention(query, key):
        scores = query @ key
        scores[:, :, 1:, 1:] += query.sum()
        return scores * scores

    query, key = torch.randn(2, 2, 3, 4, requires_grad=True), torch.randn(2, 2, 4, 3, requires_grad=True)
    step = torchgraft.capture_training(lambda q, k: attention(q, k).sum(), (query, key)).run(query, key)
    expected = torch.autograd.grad(attention(query, key).sum(), (query, key))
    torch.testing.assert_close(tuple(step.gradients.values()), expected)


def test_a_model_runs_twice_however_many_buffers_it_writes(monkeypatch):
    runs = []
    begin = joint._JointWalk.begin
    monkeypatch.setattr(joint._JointWalk, "begin", lambda walk: (runs.append(walk), begin(walk))[1])
    model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(5)])
    before = copy.deepcopy(model.state_dict())
    capture_training(model, (torch.randn(6, 4),))
    assert len(runs) == 2
    torch.testing.assert_close(model.state_dict(), before)
