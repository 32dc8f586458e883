"""Batch norms fused into the layers beside them: every kind of layer and spelling in double precision, and every refusal."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchgraft
from tests.passes.contract import check_edit
from torchgraft import zoo
from torchgraft.errors import GuardError
from torchgraft.passes import FuseConvNorm, Pipeline

NORMS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
LEVELS = ("symbolic", "module", "function")


def settle(model):
    """Statistics and weights as after training, in double precision and evaluation mode."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.weight is not None:
                with torch.no_grad():
                    module.weight.uniform_(-2, 2)
                    module.bias.normal_()
    return model.double().eval()


def captured(model, inputs, level):
    return torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, inputs, level=level)


def norms_left(program):
    modules = [program.get_submodule(node.target) for node in program.graph.nodes if node.op == "call_module"]
    functions = [node for node in program.graph.nodes if node.target in (F.batch_norm, torch.batch_norm)]
    return len(functions) + sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules)


def check_fused(model, x, level, count=1):
    model = settle(model)
    state = copy.deepcopy(model.state_dict())
    expected = model(x)
    program = captured(model, (x,), level)
    assert check_edit(FuseConvNorm(), program) == count
    assert norms_left(program) == 0
    found = program(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), f"{name} of the model was changed"
    assert torch.equal(model(x), expected)
    return program


def shape_of(dimensions, channels, size=7):
    return (2, channels, *[size] * dimensions)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_every_convolution(dimensions, transposed, bias, level):
    kind = (TRANSPOSED if transposed else CONVOLUTIONS)[dimensions]
    layer = kind(4, 6, 3, stride=2, padding=1, dilation=2, groups=2, bias=bias)
    model = nn.Sequential(layer, NORMS[dimensions](6), nn.ReLU())
    check_fused(model, torch.randn(shape_of(dimensions, 4)).double(), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("transposed", [False, True])
def test_groups(transposed, groups, level):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    check_fused(
        nn.Sequential(kind(6, 12, 3, groups=groups), nn.BatchNorm2d(12)), torch.randn(2, 6, 5, 5).double(), level
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias, level):
    model = nn.Sequential(nn.Linear(5, 7, bias=bias), nn.BatchNorm1d(7))
    check_fused(model, torch.randn(3, 5).double(), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_padding_modes_after(mode, affine, level):
    layer = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode)
    check_fused(nn.Sequential(layer, nn.BatchNorm2d(4, affine=affine)), torch.randn(2, 3, 6, 6).double(), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 6, 3, groups=2),
        nn.Conv2d(4, 6, 3, stride=2, dilation=2, bias=False),
        nn.Conv2d(4, 6, 3, padding="valid"),
        nn.Conv2d(4, 6, 1, padding="same"),
        nn.Conv3d(4, 8, 2, groups=4),
        nn.ConvTranspose2d(4, 6, 1, groups=2),
        nn.Linear(4, 6),
        nn.Linear(4, 6, bias=False),
    ],
    ids=str,
)
def test_norm_before(layer, level):
    dimensions = layer.weight.dim() - 2
    model = nn.Sequential(NORMS[dimensions](4), copy.deepcopy(layer), nn.ReLU())
    check_fused(model, torch.randn(shape_of(dimensions, 4)).double(), level)


def test_norm_before_a_layer_that_pads_by_its_own_values():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"))
    check_fused(model, torch.randn(2, 4, 6, 6).double(), "symbolic")


@pytest.mark.parametrize("level", LEVELS)
def test_norms_on_both_sides_and_in_a_row(level):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.ReLU())
    check_fused(model, torch.randn(2, 3, 6, 6).double(), level, count=3)


class Functions(nn.Module):
    """The functional spellings, with weights of its own."""

    def __init__(self, kind, bias=True):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(4, 3, 2, 2))
        self.bias = nn.Parameter(torch.randn(4)) if bias else None
        self.scale, self.shift = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("variance", torch.rand(4) + 0.5)

    def forward(self, x):
        if self.kind == "positional":
            y = F.conv2d(x, self.weight, self.bias, 2)
            return F.batch_norm(y, self.mean, self.variance, self.scale, self.shift, False, 0.1, 1e-3)
        if self.kind == "keywords":
            y = F.conv2d(input=x, weight=self.weight, bias=self.bias, padding=1)
            return F.batch_norm(input=y, running_mean=self.mean, running_var=self.variance, eps=1e-4)
        y = torch.conv2d(x, self.weight, bias=self.bias)
        return torch.batch_norm(y, self.scale, self.shift, self.mean, self.variance, False, 0.1, 1e-5, True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["positional", "keywords", "torch"])
def test_functional_spellings(kind, bias, level):
    program = check_fused(Functions(kind, bias), torch.randn(2, 3, 5, 5).double(), level)
    # The weights that the program has are all used, and what went into them is gone.
    fetched = {node.target for node in program.graph.nodes if node.op == "get_attr"}
    unused = {"scale", "shift"} if kind == "keywords" else set()  # the model has them, and so do its checkpoints
    assert set(program.state_dict()) <= fetched | unused


def test_training_flag_that_is_fetched():
    class Model(Functions):
        def forward(self, x):
            y = F.conv2d(x, self.weight)
            return F.batch_norm(y, self.mean, self.variance, None, None, self.training)

    x = torch.randn(2, 3, 5, 5).double()
    program = check_fused(Model("flag"), x, "symbolic")
    with pytest.raises(GuardError, match=r"self\.training"):
        program.train()(x)


@pytest.mark.parametrize("level", LEVELS)
def test_resnet_50_has_53_pairs(level):
    model = zoo.create("resnet50").eval()
    x = torch.randn(1, 3, 64, 64)
    program = captured(model, (x,), level)
    assert FuseConvNorm()(program).changes == 53
    assert norms_left(program) == 0
    assert not any("running_mean" in name for name in program.state_dict())
    with torch.no_grad():
        expected, found = model(x), program(x)
    # The paper's rtol, with an atol for the many sums of thousands of terms in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))


def test_resnet_18_in_double_precision():
    model = settle(zoo.create("resnet18"))
    x = torch.randn(2, 3, 64, 64).double()
    program = torchgraft.symbolic_trace(model)
    assert FuseConvNorm()(program).changes == 20
    expected = model(x)
    torch.testing.assert_close(program(x), expected, rtol=1e-10, atol=1e-10 * float(expected.detach().abs().max()))


def test_channels_last_stays():
    model = settle(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))).to(memory_format=torch.channels_last)
    program = torchgraft.symbolic_trace(model)
    FuseConvNorm()(program)
    assert program.get_submodule("0").weight.is_contiguous(memory_format=torch.channels_last)


def test_fused_weights_can_be_trained_and_saved():
    model = settle(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    program = torchgraft.symbolic_trace(model)
    FuseConvNorm()(program)
    program(torch.randn(1, 3, 5, 5).double()).sum().backward()
    assert all(parameter.grad is not None for parameter in program.parameters())
    assert set(program.state_dict()) == {"0.weight", "0.bias"}
    assert model[0].weight.grad is None
    copied = copy.deepcopy(program)
    copied.load_state_dict(program.state_dict())


def test_hooks_of_a_fused_layer_are_its_own():
    model = settle(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    program = torchgraft.symbolic_trace(model)
    FuseConvNorm()(program)
    calls = []
    program.get_submodule("0").register_forward_hook(lambda *args: calls.append(args))
    model(torch.randn(1, 3, 5, 5).double())
    assert calls == []


# ---- refusals ----


def refused(model, x=None, level="symbolic", prepare=True):
    model = settle(model) if prepare else model
    x = torch.randn(2, 3, 6, 6).double() if x is None else x
    program = captured(model, (x,), level)
    before = program.code
    report = FuseConvNorm()(program)
    assert report.changes == 0 and program.code == before
    (note,) = report.notes
    assert re.match(r"'\w+'( \(.*\))? stays: ", note), note
    return note.partition(" stays: ")[2]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)


def model_of(forward, cls=Pair):
    return type("Model", (cls,), {"forward": forward})()


@pytest.mark.parametrize("level", LEVELS)
def test_conv_used_twice(level):
    reason = refused(model_of(lambda self, x: self.bn(self.conv(self.conv(x)))), level=level)
    assert "it is used 2 times" in reason


def test_conv_under_two_names():
    model = model_of(lambda self, x: self.bn(self.conv(x)) + self.other(x))
    model.other = model.conv
    assert "it is used 2 times" in refused(model)


@pytest.mark.parametrize("level", LEVELS)
def test_result_used_elsewhere(level):
    def forward(self, x):
        y = self.conv(x)
        return self.bn(y) + y

    assert re.search(r"its result is also used by 'add\w*'", refused(model_of(forward), level=level))


def test_result_returned():
    def forward(self, x):
        y = self.conv(x)
        return self.bn(y), y

    assert "its result is also used by 'output'" in refused(model_of(forward))


def test_training_mode():
    model = model_of(lambda self, x: self.bn(self.conv(x))).double()
    assert "it is in training mode" in refused(model, prepare=False)


def test_training_mode_of_the_norm_alone():
    model = settle(model_of(lambda self, x: self.bn(self.conv(x))))
    model.bn.train()
    assert "it is in training mode" in refused(model, prepare=False)


def test_no_running_statistics():
    model = model_of(lambda self, x: self.bn(self.conv(x)))
    model.bn = nn.BatchNorm2d(3, track_running_stats=False)
    assert "no running statistics" in refused(model)


def test_shared_statistics():
    model = settle(model_of(lambda self, x: self.bn(self.conv(x)) + self.bn(self.second(x))))
    model.second = nn.Conv2d(3, 3, 3, padding=1).double()
    program = torchgraft.symbolic_trace(model)
    report = FuseConvNorm()(program)
    assert report.changes == 0
    assert all("its statistics are shared by 2 calls" in note for note in report.notes) and len(report.notes) == 2


def test_padding_before_a_convolution():
    assert "it pads with zeros" in refused(model_of(lambda self, x: self.conv(self.bn(x))))


def test_transposed_convolution_after_a_norm():
    model = model_of(lambda self, x: self.conv(self.bn(x)))
    model.conv = nn.ConvTranspose2d(3, 4, 3)
    assert "at its borders" in refused(model)


def test_norm_beside_nothing():
    assert "'relu' before it is no convolution" in refused(model_of(lambda self, x: self.bn(torch.relu(x)).relu()))


def test_hooks():
    model = model_of(lambda self, x: self.bn(self.conv(x)))
    model.conv.register_forward_hook(lambda module, args, result: None)
    assert "it has hooks" in refused(model)


def test_subclass():
    class Mine(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) * 2

    model = model_of(lambda self, x: self.bn(self.conv(x)))
    model.conv = Mine(3, 3, 3)
    program = torchgraft.capture(settle(model), (torch.randn(2, 3, 6, 6).double(),), leaf=Mine)
    (note,) = FuseConvNorm()(program).notes
    assert "it is a Mine, which may compute something else" in note


def test_parametrized_weights():
    model = model_of(lambda self, x: self.bn(self.conv(x)))
    model.conv = nn.utils.parametrizations.weight_norm(model.conv)
    program = torchgraft.capture(settle(model), (torch.randn(2, 3, 6, 6).double(),))
    x = torch.randn(2, 3, 6, 6).double()
    expected = program(x)
    FuseConvNorm()(program)
    assert torch.equal(program(x), expected)


def test_weights_written_by_the_program():
    def forward(self, x):
        self.bn.running_mean.add_(1)
        return self.bn(self.conv(x))

    assert "the program writes its weights or the statistics" in refused(model_of(forward))


def test_different_regions():
    def forward(self, x):
        with torch.no_grad():
            y = self.conv(x)
        return self.bn(y)

    assert "different regions" in refused(model_of(forward))


def test_autocast_region():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.bn(self.conv(x))

    model = model_of(forward).eval()
    assert "autocast" in refused(model, torch.randn(2, 3, 6, 6), prepare=False)


def test_computed_weights():
    def forward(self, x):
        return self.bn(F.conv2d(x, self.conv.weight * 2))

    assert "its weights are computed by the program" in refused(model_of(forward))


def test_different_types():
    model = settle(model_of(lambda self, x: self.bn(self.conv(x)))).float()
    model.bn.double()
    program = torchgraft.symbolic_trace(model)
    (note,) = FuseConvNorm()(program).notes
    assert "its weights are torch.float32 and the statistics torch.float64" in note


def test_the_norm_of_another_dimension_is_refused():
    """A linear layer on three dimensions: the norm goes by the second, the layer's features are the third."""
    model = settle(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    x = torch.randn(2, 4, 3).double()
    for level in ("module", "function"):
        assert "the program is for 3 dimensions" in refused(model, x, level=level, prepare=False)
    program = torchgraft.symbolic_trace(model)
    assert FuseConvNorm()(program).changes == 1
    with pytest.raises(GuardError, match="ndim of 'input_1' = 2, and now it is 3"):
        program(x)


def test_unbatched_input_of_a_one_dimensional_layer():
    model = settle(nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)))
    x = torch.randn(3, 4).double()
    model(x)  # the four channels are taken for a batch of four, and the four places for channels
    program = torchgraft.symbolic_trace(model)
    FuseConvNorm()(program)
    with pytest.raises(GuardError):
        program(x)


def test_other_uses_of_the_weight_keep_it():
    def forward(self, x):
        return self.bn(self.conv(x)) + self.conv.weight.sum()

    x = torch.randn(2, 3, 6, 6).double()
    for level in LEVELS:
        check_fused(model_of(forward), x, level)


def test_guards_stay():
    model = settle(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    x = torch.randn(2, 3, 6, 6).double()
    program = torchgraft.capture(model, (x,), level="function")
    before = [str(guard) for guard in program.guards]
    Pipeline("fuse-conv-norm, remove-dead-code")(program, check=x)
    found = [str(guard) for guard in program.guards]
    assert [guard for guard in found if "training is False" not in guard] == before
    assert len(found) == len(before) + 1 and "num_batches_tracked" not in program.code
    with pytest.raises(GuardError):
        program.train()(x)


def test_meta_tensors():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    program = torchgraft.symbolic_trace(model)
    assert FuseConvNorm()(program).changes == 1
    assert program(torch.ones(1, 3, 5, 5, device="meta")).shape == (1, 4, 3, 3)


def test_same_as_torch_fx():
    import torch.fx.experimental.optimization as theirs

    model = settle(zoo.create("resnet18"))
    x = torch.randn(1, 3, 32, 32).double()
    program = torchgraft.symbolic_trace(model)
    FuseConvNorm()(program)
    torch.testing.assert_close(program(x), theirs.fuse(model)(x), rtol=1e-10, atol=1e-8)


class Operators(TorchDispatchMode):
    """Notes every operator that runs with all that the choice of a kernel can depend on."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
        self.calls.append((func, [layout(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))
        return result


def layout(tensor):
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.data_ptr() % 64


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_fused_network_runs_the_same_kernels_as_that_of_torch_fx(memory_format):
    import torch.fx.experimental.optimization as theirs

    model = zoo.create("resnet50").eval()
    x = torch.randn(1, 3, 64, 64).to(memory_format=memory_format)
    program = torchgraft.symbolic_trace(model)
    FuseConvNorm()(program)
    recorded = []
    for network in (program, theirs.fuse(model)):
        network.to(memory_format=memory_format)
        with torch.no_grad(), Operators() as operators:
            network(x)
        recorded.append(operators.calls)
    assert sum(func is torch.ops.aten.convolution.default for func, _ in recorded[0]) == 53
    assert recorded[0] == recorded[1]


def test_shapes_that_a_pass_has_noted_are_heeded() -> None:
    """A linear layer on three dimensions ends with its channels, where a batch norm has them in the middle."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(2, 4, 6)
    program = torchgraft.symbolic_trace(model)
    report = torchgraft.passes.Pipeline("propagate-shapes, fuse-conv-norm")(program, check=x)
    assert report.passes[1].changes == 0 and "is for 3 dimensions" in report.passes[1].notes[0]
    flat = torchgraft.symbolic_trace(model)
    assert torchgraft.passes.Pipeline("propagate-shapes, fuse-conv-norm")(flat, check=x[0]).passes[1].changes == 1


@pytest.mark.parametrize(
    "model, shape",
    [
        (nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, padding="same", bias=False), nn.BatchNorm2d(6)), (2, 4, 8, 8)),
        (nn.Sequential(nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), nn.BatchNorm1d(6)), (2, 4, 8)),
        (nn.Sequential(nn.BatchNorm3d(4), nn.Conv3d(4, 2, 2, dilation=2)), (2, 4, 5, 5, 5)),
        (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), (3, 4)),
    ],
)
def test_programs_of_operators(model, shape):
    model = copy.deepcopy(model).double().eval()
    for norm in model:
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    x = torch.randn(shape, dtype=torch.float64)
    program = torchgraft.capture(model, (x,), level="aten")
    assert check_edit(FuseConvNorm(), program) == 1
    torch.testing.assert_close(program(x), model(x), rtol=1e-10, atol=1e-10)
