"""Effects of modules: every class of torch.nn, in both modes, against what a run of it is seen to do."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import torchgraft
from torchgraft.analysis.effects import Effects, effects_of, is_impure
from torchgraft.ir.graph import Graph


class Root(nn.Module):
    """A module with one child `m`, which is what the graphs here call."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.m = child


def effects_of_module(module: nn.Module, inputs: int = 1, **keywords) -> Effects:
    root = Root(module)
    graph = Graph(root)
    placeholders = tuple(graph.placeholder(f"x{i}") for i in range(inputs))
    return effects_of(graph.call_module("m", placeholders, keywords))


def images(*shape: int) -> torch.Tensor:
    return torch.randn(2, 4, *shape)


def indices(*shape: int) -> torch.Tensor:
    return torch.randint(0, 3, shape)


# The arguments that make a module, then the inputs of a call.
CASES: dict[str, list[tuple]] = {
    "AdaptiveAvgPool1d": [((2,), (images(6),))],
    "AdaptiveAvgPool2d": [((2,), (images(6, 6),))],
    "AdaptiveAvgPool3d": [((2,), (images(6, 6, 6),))],
    "AdaptiveLogSoftmaxWithLoss": [((4, 6, [2, 4]), (torch.randn(3, 4), indices(3)))],
    "AdaptiveMaxPool1d": [((2,), (images(6),)), ((2, True), (images(6),))],
    "AdaptiveMaxPool2d": [((2,), (images(6, 6),))],
    "AdaptiveMaxPool3d": [((2,), (images(6, 6, 6),))],
    "AlphaDropout": [((0.5,), (images(6),)), ((0.5, True), (images(6),)), ((0.0,), (images(6),))],
    "AvgPool1d": [((2,), (images(6),))],
    "AvgPool2d": [((2,), (images(6, 6),))],
    "AvgPool3d": [((2,), (images(6, 6, 6),))],
    "BCELoss": [((), (torch.rand(3), torch.rand(3)))],
    "BCEWithLogitsLoss": [((), (torch.rand(3), torch.rand(3)))],
    "BatchNorm1d": [((4,), (images(6),)), ((4, 1e-5, None), (images(6),)), ((4, 1e-5, 0.1, True, False), (images(6),))],
    "BatchNorm2d": [((4,), (images(6, 6),))],
    "BatchNorm3d": [((4,), (images(6, 6, 6),))],
    "Bilinear": [((3, 4, 2), (torch.randn(5, 3), torch.randn(5, 4)))],
    "CELU": [((), (images(6),)), ((1.0, True), (images(6),))],
    "CTCLoss": [
        ((), (torch.randn(5, 2, 4).log_softmax(2), indices(2, 3) + 1, torch.tensor([5, 5]), torch.tensor([2, 2])))
    ],
    "ChannelShuffle": [((2,), (images(6, 6),))],
    "CircularPad1d": [((1,), (images(6),))],
    "CircularPad2d": [((1,), (images(6, 6),))],
    "CircularPad3d": [((1,), (images(6, 6, 6),))],
    "ConstantPad1d": [((1, 0.0), (images(6),))],
    "ConstantPad2d": [((1, 0.0), (images(6, 6),))],
    "ConstantPad3d": [((1, 0.0), (images(6, 6, 6),))],
    "Conv1d": [((4, 2, 3), (images(6),))],
    "Conv2d": [((4, 2, 3), (images(6, 6),)), ((4, 2, 3, 1, "same", 1, 1, True, "circular"), (images(6, 6),))],
    "Conv3d": [((4, 2, 3), (images(6, 6, 6),))],
    "ConvTranspose1d": [((4, 2, 3), (images(6),))],
    "ConvTranspose2d": [((4, 2, 3), (images(6, 6),))],
    "ConvTranspose3d": [((4, 2, 3), (images(6, 6, 6),))],
    "CosineEmbeddingLoss": [((), (torch.randn(3, 4), torch.randn(3, 4), torch.ones(3)))],
    "CosineSimilarity": [((), (torch.randn(3, 4), torch.randn(3, 4)))],
    "CrossEntropyLoss": [((), (torch.randn(3, 4), indices(3)))],
    "CrossMapLRN2d": [((3,), (images(6, 6),))],
    "Dropout": [((0.5,), (images(6),)), ((0.5, True), (images(6),)), ((0.0,), (images(6),))],
    "Dropout1d": [((), (images(6),))],
    "Dropout2d": [((), (images(6, 6),))],
    "Dropout3d": [((), (images(6, 6, 6),))],
    "ELU": [((), (images(6),)), ((1.0, True), (images(6),))],
    "Embedding": [((5, 4), (indices(3),)), ((5, 4, None, 1.0), (indices(3),))],
    "EmbeddingBag": [((5, 4), (indices(3, 2),)), ((5, 4, 1.0), (indices(3, 2),))],
    "FeatureAlphaDropout": [((), (images(6),))],
    "Flatten": [((), (images(6),))],
    "Fold": [(((4, 4), (2, 2)), (torch.randn(1, 8, 9),))],
    "FractionalMaxPool2d": [((2, 3), (images(6, 6),))],
    "FractionalMaxPool3d": [((2, 3), (images(6, 6, 6),))],
    "GELU": [((), (images(6),))],
    "GLU": [((), (images(6),))],
    "GRU": [((4, 3), (torch.randn(5, 2, 4),)), ((4, 3, 2, True, False, 0.5), (torch.randn(5, 2, 4),))],
    "GRUCell": [((4, 3), (torch.randn(2, 4),))],
    "GaussianNLLLoss": [((), (torch.randn(3), torch.randn(3), torch.ones(3)))],
    "GroupNorm": [((2, 4), (images(6),))],
    "Hardshrink": [((), (images(6),))],
    "Hardsigmoid": [((), (images(6),)), ((True,), (images(6),))],
    "Hardswish": [((), (images(6),)), ((True,), (images(6),))],
    "Hardtanh": [((), (images(6),)), ((-1.0, 1.0, True), (images(6),))],
    "HingeEmbeddingLoss": [((), (torch.randn(3), torch.ones(3)))],
    "HuberLoss": [((), (torch.randn(3), torch.randn(3)))],
    "Identity": [((), (images(6),))],
    "InstanceNorm1d": [((4,), (images(6),)), ((4, 1e-5, 0.1, False, True), (images(6),))],
    "InstanceNorm2d": [((4,), (images(6, 6),)), ((4, 1e-5, 0.1, True, True), (images(6, 6),))],
    "InstanceNorm3d": [((4,), (images(6, 6, 6),))],
    "KLDivLoss": [((), (torch.randn(3), torch.rand(3)))],
    "L1Loss": [((), (torch.randn(3), torch.randn(3)))],
    "LPPool1d": [((2, 2), (images(6),))],
    "LPPool2d": [((2, 2), (images(6, 6),))],
    "LPPool3d": [((2, 2), (images(6, 6, 6),))],
    "LSTM": [((4, 3), (torch.randn(5, 2, 4),)), ((4, 3, 2, True, False, 0.5), (torch.randn(5, 2, 4),))],
    "LSTMCell": [((4, 3), (torch.randn(2, 4),))],
    "LayerNorm": [((6,), (images(6),))],
    "LeakyReLU": [((), (images(6),)), ((0.1, True), (images(6),))],
    "Linear": [((4, 3), (torch.randn(2, 4),))],
    "LocalResponseNorm": [((2,), (images(6, 6),))],
    "LogSigmoid": [((), (images(6),))],
    "LogSoftmax": [((1,), (images(6),)), ((), (images(6),))],
    "MSELoss": [((), (torch.randn(3), torch.randn(3)))],
    "MarginRankingLoss": [((), (torch.randn(3), torch.randn(3), torch.ones(3)))],
    "MaxPool1d": [((2,), (images(6),))],
    "MaxPool2d": [((2,), (images(6, 6),)), ((2, 2, 0, 1, True), (images(6, 6),))],
    "MaxPool3d": [((2,), (images(6, 6, 6),)), ((2, 2, 0, 1, True), (images(6, 6, 6),))],
    "MaxUnpool1d": [((2,), (images(3), indices(2, 4, 3)))],
    "MaxUnpool2d": [((2,), (images(3, 3), indices(2, 4, 3, 3)))],
    "MaxUnpool3d": [((2,), (images(3, 3, 3), indices(2, 4, 3, 3, 3)))],
    "Mish": [((), (images(6),)), ((True,), (images(6),))],
    "MultiLabelMarginLoss": [((), (torch.randn(3, 4), indices(3, 4)))],
    "MultiLabelSoftMarginLoss": [((), (torch.randn(3, 4), torch.rand(3, 4)))],
    "MultiMarginLoss": [((), (torch.randn(3, 4), indices(3)))],
    "MultiheadAttention": [((4, 2), (torch.randn(3, 2, 4),) * 3), ((4, 2, 0.5), (torch.randn(3, 2, 4),) * 3)],
    "NLLLoss": [((), (torch.randn(3, 4), indices(3)))],
    "NLLLoss2d": [((), (torch.randn(3, 4, 2, 2), indices(3, 2, 2)))],
    "PReLU": [((), (images(6),))],
    "PairwiseDistance": [((), (torch.randn(3, 4), torch.randn(3, 4)))],
    "PixelShuffle": [((2,), (images(6, 6),))],
    "PixelUnshuffle": [((2,), (images(6, 6),))],
    "PoissonNLLLoss": [((), (torch.randn(3), torch.rand(3)))],
    "RMSNorm": [((6,), (images(6),))],
    "RNN": [((4, 3), (torch.randn(5, 2, 4),)), ((4, 3, 2, "relu", True, False, 0.5), (torch.randn(5, 2, 4),))],
    "RNNCell": [((4, 3), (torch.randn(2, 4),))],
    "RReLU": [((), (images(6),)), ((0.1, 0.3, True), (images(6),))],
    "ReLU": [((), (images(6),)), ((True,), (images(6),))],
    "ReLU6": [((), (images(6),)), ((True,), (images(6),))],
    "ReflectionPad1d": [((1,), (images(6),))],
    "ReflectionPad2d": [((1,), (images(6, 6),))],
    "ReflectionPad3d": [((1,), (images(6, 6, 6),))],
    "ReplicationPad1d": [((1,), (images(6),))],
    "ReplicationPad2d": [((1,), (images(6, 6),))],
    "ReplicationPad3d": [((1,), (images(6, 6, 6),))],
    "SELU": [((), (images(6),)), ((True,), (images(6),))],
    "SiLU": [((), (images(6),)), ((True,), (images(6),))],
    "Sigmoid": [((), (images(6),))],
    "SmoothL1Loss": [((), (torch.randn(3), torch.randn(3)))],
    "SoftMarginLoss": [((), (torch.randn(3), torch.ones(3)))],
    "Softmax": [((1,), (images(6),)), ((), (images(6),))],
    "Softmax2d": [((), (images(6, 6),))],
    "Softmin": [((1,), (images(6),))],
    "Softplus": [((), (images(6),))],
    "Softshrink": [((), (images(6),))],
    "Softsign": [((), (images(6),))],
    "Tanh": [((), (images(6),))],
    "Tanhshrink": [((), (images(6),))],
    "Threshold": [((0.1, 0.0), (images(6),)), ((0.1, 0.0, True), (images(6),))],
    "Transformer": [
        ((4, 2, 1, 1, 8, 0.0), (torch.randn(3, 2, 4),) * 2),
        ((4, 2, 1, 1, 8), (torch.randn(3, 2, 4),) * 2),
    ],
    "TransformerDecoderLayer": [((4, 2, 8, 0.0), (torch.randn(3, 2, 4),) * 2)],
    "TransformerEncoderLayer": [((4, 2, 8, 0.0), (torch.randn(3, 2, 4),)), ((4, 2, 8), (torch.randn(3, 2, 4),))],
    "TripletMarginLoss": [((), (torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)))],
    "TripletMarginWithDistanceLoss": [((), (torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)))],
    "Unflatten": [((1, (2, 2)), (images(6),))],
    "Unfold": [((2,), (images(6, 6),))],
    "Upsample": [((None, 2), (images(6),)), ((None, 2, "bilinear"), (images(6, 6),))],
    "UpsamplingBilinear2d": [((None, 2), (images(6, 6),))],
    "UpsamplingNearest2d": [((None, 2), (images(6, 6),))],
    "ZeroPad1d": [((1,), (images(6),))],
    "ZeroPad2d": [((1,), (images(6, 6),))],
    "ZeroPad3d": [((1,), (images(6, 6, 6),))],
}
# Containers, wrappers and what cannot run in one process on a CPU; lazy modules write parameters and are tested below.
ELSEWHERE = {
    "Buffer", "Container", "DataParallel", "LinearCrossEntropyLoss", "Module", "ModuleDict", "ModuleList", "Parameter",
    "ParameterDict", "ParameterList", "Sequential", "SyncBatchNorm", "TransformerDecoder", "TransformerEncoder",
    "RNNBase", "RNNCellBase", "UninitializedBuffer", "UninitializedParameter",
}  # fmt: skip
# The analysis says that they may have an effect although none was seen; every one is listed with the reason.
TOO_CAREFUL = {
    "AdaptiveLogSoftmaxWithLoss": "how often its loop runs depends on values",
}


def seen_to_do(module: nn.Module, inputs: tuple) -> tuple[set[str], bool]:
    """The paths of state and the inputs that a run writes, and whether it draws random numbers."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state |= {f"x{i}": value for i, value in enumerate(inputs)}
    before = {name: (value._version, value.clone()) for name, value in state.items()}
    plain = {(name, key): value for name, part in module.named_modules() for key, value in vars(part).items()}
    plain = {key: value for key, value in plain.items() if isinstance(value, int | float | str | None)}
    generator = torch.get_rng_state()
    with torch.no_grad():
        module(*inputs)
    for (name, key), value in plain.items():
        assert getattr(module.get_submodule(name), key) == value
    # The kernels of batch norm write without counting versions, and some in-place kernels write equal values.
    written = {n for n, v in state.items() if v._version != before[n][0] or not torch.equal(v, before[n][1])}
    return written, not torch.equal(generator, torch.get_rng_state())


def test_every_class_of_torch_nn_is_tried():
    classes = {name for name in nn.modules.__all__ if not name.startswith("Lazy")}
    assert {name for name in classes - set(CASES) - ELSEWHERE if not name.startswith("LinearCrossEntropy")} == set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_what_a_module_is_seen_to_do_is_known(name, training):
    for arguments, inputs in CASES[name]:
        module = getattr(nn, name)(*arguments).train(training)
        effects = effects_of_module(module, len(inputs))
        inputs = tuple(value.clone() for value in inputs)
        written, drawn = seen_to_do(module, inputs)
        known = {str(place).removeprefix("m.") for place in effects.writes}
        if name in TOO_CAREFUL:
            assert effects.unknown or (written <= known and drawn <= effects.random)
        else:
            assert not effects.unknown, effects.reasons
            assert known == written
            assert effects.random == drawn, effects.reasons


def test_lazy_modules_write_their_parameters():
    assert is_impure_module(nn.LazyLinear(3))
    assert is_impure_module(nn.LazyConv2d(3, 3))


def is_impure_module(module: nn.Module, inputs: int = 1) -> bool:
    root = Root(module)
    graph = Graph(root)
    return is_impure(graph.call_module("m", tuple(graph.placeholder(f"x{i}") for i in range(inputs))))


# ---- modules of the user ----


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 2


class Subclass(nn.Linear):
    pass


@pytest.mark.parametrize("module", [Counting(), Subclass(2, 2), nn.Sequential(nn.ReLU(), Counting())])
def test_a_users_module_may_do_anything_and_is_not_run(module):
    effects = effects_of_module(module)
    assert effects.unknown and "not torch's; mark it with torchgraft.pure" in effects.reasons[0]
    assert all(getattr(part, "calls", 0) == 0 for part in module.modules())


def test_a_module_that_is_marked_pure_only_computes():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 2

    assert is_impure_module(Scale())
    assert not is_impure_module(torchgraft.pure(Scale()))
    torchgraft.pure(Scale)
    effects = effects_of_module(Scale())
    assert not effects and {str(place) for place in effects.shares} == {"x0", "m"}  # it may hand back what it holds

    class Louder(Scale):
        pass

    assert is_impure_module(Louder())  # of a subclass nothing was said


def test_a_child_in_training_mode_counts():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    assert effects_of_module(module).random
    assert not effects_of_module(module.eval())
    module.append(nn.BatchNorm1d(2)).train()
    assert "m.2.running_mean" in effects_of_module(module).writes


def test_answers_follow_every_change_of_the_module():
    root = Root(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    graph = Graph(root)
    node = graph.call_module("m", (graph.placeholder("x"),))
    assert not is_impure(node)
    root.m[0].inplace = True
    assert is_impure(node)
    root.m[0].inplace = False
    assert not is_impure(node)
    handle = root.m[1].register_forward_hook(lambda module, inputs, output: output)
    assert is_impure(node)
    handle.remove()
    assert not is_impure(node)
    root.m.append(nn.Dropout())
    assert is_impure(node)
    root.m.eval()
    assert not is_impure(node)
    root.m[0] = nn.ReLU(inplace=True)
    assert is_impure(node)
    root.m[0] = nn.ReLU()
    assert not is_impure(node)
    root.m.forward = lambda x: x
    assert is_impure(node)
    del root.m.forward
    assert not is_impure(node)
    root.m = nn.Hardtanh(inplace=True)
    assert is_impure(node)


def test_functions_that_a_module_is_given_count():
    assert not effects_of_module(nn.TransformerEncoderLayer(4, 2, 8, 0.0, activation=torch.tanh))
    assert effects_of_module(nn.TransformerEncoderLayer(4, 2, 8, 0.0, activation=lambda x: x.relu())).unknown


def test_global_hooks_may_do_anything():
    root = Root(nn.Linear(2, 2))
    graph = Graph(root)
    node = graph.call_module("m", (graph.placeholder("x"),))
    assert not is_impure(node)
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output)
    try:
        assert is_impure(node)
    finally:
        handle.remove()
    assert not is_impure(node)


def test_parametrizations_are_tried():
    spectral = parametrizations.spectral_norm(nn.Linear(3, 3))
    writes = {str(place) for place in effects_of_module(spectral).writes}
    assert "m.parametrizations.weight.0._u" in writes
    assert not effects_of_module(spectral.eval()).writes
    assert not effects_of_module(parametrizations.weight_norm(nn.Linear(3, 3)))


def test_the_mark_of_torch_fx_is_honoured():
    module = nn.Linear(2, 2)
    module._is_impure = True
    assert is_impure_module(module)
    module._is_impure = False
    assert not is_impure_module(module)


def test_compiled_and_missing_modules_are_unknown():
    assert is_impure_module(torch.jit.script(nn.ReLU()))
    root = Root(nn.ReLU())
    graph = Graph(root)
    node = graph.call_module("m", (graph.placeholder("x"),))
    root.m = None
    assert effects_of(node).unknown
    assert effects_of(Graph().call_module("m")).unknown


def test_a_program_inside_a_program_is_read_node_by_node():
    class Program(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x, y):
            return self.norm(x).view(-1), y.exp()

    inner = torchgraft.symbolic_trace(Program().eval())
    effects = effects_of_module(inner, 2)
    assert not effects and not effects.shares
    assert {str(place) for place in effects_of_module(inner.train(), 2).writes} == {
        "m.norm.running_mean",
        "m.norm.running_var",
        "m.norm.num_batches_tracked",
    }
    x, y = list(inner.graph.nodes)[:2]
    with inner.graph.inserting_after(y):
        inner.graph.call_method("mul_", (y, 2))
    assert {str(place) for place in effects_of_module(inner.eval(), 2).writes} == {"x1"}


def test_a_list_in_a_program_holds_what_is_put_into_it():
    graph = Graph()
    x = graph.placeholder("x")
    holder = graph.call_function(list, ((),))
    graph.call_method("append", (holder, x))
    graph.call_method("mul_", (graph.call_method("pop", (holder,)), 2))
    graph.output(1)
    inner = torchgraft.GraphModule(nn.Module(), graph)
    assert {str(place) for place in effects_of_module(inner).writes} == {"x0"}


def test_a_program_of_torch_fx_inside_a_program_is_read_too():
    class Program(nn.Module):
        def __init__(self, inplace):
            super().__init__()
            self.act = nn.ReLU(inplace)

        def forward(self, x):
            return self.act(x)

    assert not effects_of_module(torch.fx.symbolic_trace(Program(False)))
    assert effects_of_module(torch.fx.symbolic_trace(Program(True))).writes


def test_no_module_is_kept_alive():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    effects_of_module(module)
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("module", [nn.BatchNorm1d(2), nn.LSTM(2, 2), parametrizations.spectral_norm(nn.Linear(2, 2))])
def test_neither_the_module_nor_random_numbers_are_changed_by_the_question(module):
    before = [dict(vars(part)) for part in module.modules()]
    values = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    assert effects_of_module(module) is not None
    for part, attributes in zip(module.modules(), before, strict=True):
        assert vars(part).keys() == attributes.keys()
        assert all(vars(part)[name] is value for name, value in attributes.items())
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_modules_of_any_precision_are_tried(dtype):
    for module in (
        nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2),
        nn.Linear(4, 3),
        nn.LSTM(4, 3),
        nn.LayerNorm(6),
    ):
        effects = effects_of_module(module.to(dtype))
        assert not effects and not effects.shares
