"""e3nn writes the code of its tensor products as graphs; they run, are compiled, scripted, copied and pickled."""

import contextlib
import copy
import pickle

import e3nn
import torch
import torch.fx
from e3nn import nn, o3
from e3nn.util.codegen import CodeGenMixin
from e3nn.util.jit import compile_mode, script, trace_module

from benchmarks.clients.case import each, nodes, same

PRODUCTS = {
    "FullyConnected": (lambda: o3.FullyConnectedTensorProduct("2x0e + 1x1o", "1x0e + 1x1o", "2x0e + 1x1o + 1x2e")),
    "Full": (lambda: o3.FullTensorProduct("1x0e + 1x1o", "1x1o")),
    "Elementwise": (lambda: o3.ElementwiseTensorProduct("2x0e + 2x1o", "2x0e + 2x1o")),
    "Square": (lambda: o3.TensorSquare("2x0e + 1x1o")),
    "unweighted": (lambda: o3.TensorProduct("3x1o", "3x1o", "3x0e", [(0, 0, 0, "uuu", False)])),
    "uvu": (lambda: o3.TensorProduct("3x1o", "2x1o", "3x0e", [(0, 0, 0, "uvu", True)])),
    "uvv": (lambda: o3.TensorProduct("3x1o", "2x1o", "2x1e", [(0, 0, 0, "uvv", True)])),
    "uuw": (lambda: o3.TensorProduct("3x1o", "3x1o", "4x0e", [(0, 0, 0, "uuw", True)])),
    "uvuv": (lambda: o3.TensorProduct("3x1o", "2x1o", "6x0e", [(0, 0, 0, "uvuv", True)])),
    "external weights": (
        lambda: o3.TensorProduct("1o", "1o", "0e", [(0, 0, 0, "uvw", True)], internal_weights=False, shared_weights=False)
    ),
}  # fmt: skip


@contextlib.contextmanager
def graphs():
    """The graphs themselves are kept, and no TorchScript made from them."""
    before = e3nn.get_optimization_defaults()["jit_mode"]
    e3nn.set_optimization_defaults(jit_mode="eager")
    try:
        yield
    finally:
        e3nn.set_optimization_defaults(jit_mode=before)


def prepare(make):
    with graphs():
        return make()


def inputs(product):
    x = [product.irreps_in1.randn(5, -1)]
    if not isinstance(product, o3.TensorSquare):
        x.append(product.irreps_in2.randn(5, -1))
    if product.weight_numel and not product.internal_weights:
        x.append(torch.randn(5, product.weight_numel))
    return x


def parts(module):
    """The generated code of every part, and what kind of object holds it."""
    found = []
    for name, part in module.named_modules():
        if isinstance(part, (torch.fx.GraphModule, torch.jit.ScriptModule)):
            found.append([name, isinstance(part, torch.fx.GraphModule), getattr(part, "code", "")])
    return sorted(found)  # in the order of the model with us, in that of the calls with torch.fx


@each(**PRODUCTS)
def case_tensor_product(make):
    with graphs():
        product = make()
    x = inputs(product)
    scripted = make()
    scripted.load_state_dict({**scripted.state_dict(), **product.state_dict()}, strict=False)
    same(scripted(*x), product(*x))
    return parts(product)


@each(**PRODUCTS)
def case_equivariance(make):
    product = make()
    x = inputs(product)
    rotation = -o3.rand_matrix()
    turned = [x[0] @ product.irreps_in1.D_from_matrix(rotation).T]
    if not isinstance(product, o3.TensorSquare):
        turned.append(x[1] @ product.irreps_in2.D_from_matrix(rotation).T)
    expected = product(*x) @ product.irreps_out.D_from_matrix(rotation).T
    same(product(*turned, *x[len(turned) :]), expected, atol=1e-4, rtol=1e-3)


@each(**PRODUCTS)
def case_torch_compile(make):
    product = prepare(make)
    x = inputs(product)
    expected = make_like(make, product)(*x)
    same(torch.compile(product, backend="eager", fullgraph=True)(*x), expected)


def make_like(make, product):
    other = make()
    other.load_state_dict(product.state_dict(), strict=False)
    return other


@each("FullyConnected", "Square", "uvu")
def case_aot(name):
    product = prepare(PRODUCTS[name])
    x = inputs(product)
    same(torch.compile(product, backend="aot_eager", fullgraph=True)(*x), make_like(PRODUCTS[name], product)(*x))


@each(**PRODUCTS)
def case_copy_and_pickle(make):
    with graphs():
        product = make()
    x = inputs(product)
    same(copy.deepcopy(product)(*x), product(*x))
    again = pickle.loads(pickle.dumps(product))
    same(again(*x), product(*x))
    return [[name, is_graph] for name, is_graph, _ in parts(again)]


@each(**PRODUCTS)
def case_torchscript(make):
    product = make()
    if isinstance(product, o3.TensorSquare):  # has a call that TorchScript does not know
        return None
    x = inputs(product)
    same(script(product)(*x), product(*x))


@each("uvw", "uuu", "uvu", "uvuv")
def case_right(mode):
    count = {"uvw": 4, "uuu": 3, "uvu": 3, "uvuv": 9}[mode]
    with graphs():
        product = o3.TensorProduct("3x1o", "3x1o", f"{count}x0e", [(0, 0, 0, mode, mode != "uuu")], compile_right=True)
    x1, x2 = product.irreps_in1.randn(1, -1), product.irreps_in2.randn(1, -1)
    same(torch.einsum("zi,zio->zo", x1, product.right(x2)), product(x1, x2))
    return parts(product)


@each("2x0e + 1x1o", "4x0e + 3x1o + 2x2e", "1x0e + 1x1o")
def case_linear(irreps):
    with graphs():
        linear = o3.Linear(irreps, "3x0e + 2x1o", biases=True)
    x = linear.irreps_in.randn(4, -1)
    same(pickle.loads(pickle.dumps(linear))(x), linear(x))
    return parts(linear)


@each("2x0e + 1x1o", "4x0e + 3x1o + 2x2e")
def case_linear_compiled(irreps):
    linear = prepare(lambda: o3.Linear(irreps, "3x0e + 2x1o"))
    x = linear.irreps_in.randn(4, -1)
    same(torch.compile(linear, backend="eager", fullgraph=True)(x), linear(x))


@each("ij=ji", "ij=-ji", "ijk=jki=jik")
def case_reduced_tensor_products(formula):
    with graphs():
        reduced = o3.ReducedTensorProducts(formula, i="1o")
    x = [torch.randn(3, 3) for _ in range(formula.index("="))]
    value = reduced(*x)
    same(pickle.loads(pickle.dumps(reduced))(*x), value)
    return [str(reduced.irreps_out), parts(reduced)]


@each("ij=ji", "ijk=jki")
def case_reduced_tensor_products_compiled(formula):
    reduced = prepare(lambda: o3.ReducedTensorProducts(formula, i="1o"))
    x = [torch.randn(3, 3) for _ in range(formula.index("="))]
    same(torch.compile(reduced, backend="eager", fullgraph=True)(*x), reduced(*x))


@each(0, 1, 2, 3)
def case_spherical_harmonics(degree):
    angles = torch.randn(5, 3)
    with graphs():
        harmonics = o3.SphericalHarmonicsAlphaBeta(degree)
    value = harmonics(angles[:, 0], angles[:, 1])
    same(value, o3.spherical_harmonics_alpha_beta(degree, angles[:, 0], angles[:, 1]))
    return [nodes(part.graph) for part in harmonics.modules() if isinstance(part, torch.fx.GraphModule)]


@each("Gate", "Activation", "Extract", "FullyConnectedNet", "NormActivation", "BatchNorm", "Dropout", "S2Activation")
def case_layers(name):
    with graphs():
        layer = {
            "Gate": lambda: nn.Gate("2x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o"),
            "Activation": lambda: nn.Activation("2x0e", [torch.tanh]),
            "Extract": lambda: nn.Extract("1x0e + 1x1o + 1x0e", ["0e", "0e"], [(0,), (2,)]),
            "FullyConnectedNet": lambda: nn.FullyConnectedNet([3, 8, 2], torch.relu),
            "NormActivation": lambda: nn.NormActivation("1x0e + 1x1o", torch.sigmoid),
            "BatchNorm": lambda: nn.BatchNorm("2x0e + 1x1o"),
            "Dropout": lambda: nn.Dropout("2x0e + 1x1o", 0.5),
            "S2Activation": lambda: nn.S2Activation("1x0e + 1x1o", torch.tanh, 10),
        }[name]()
    layer.eval()
    width = 3 if name == "FullyConnectedNet" else layer.irreps_in.dim if hasattr(layer, "irreps_in") else 5
    x = torch.randn(4, width)
    same(pickle.loads(pickle.dumps(layer))(x), layer(x))
    return parts(layer)


@each("script", "trace")
def case_own_module_with_generated_code(how):
    @compile_mode(how)
    class Own(CodeGenMixin, torch.nn.Module):
        def __init__(self):
            super().__init__()
            graph = torch.fx.Graph()
            x = torch.fx.Proxy(graph.placeholder("x", torch.Tensor))
            graph.output((x * 2 + 1).node, torch.Tensor)
            self._codegen_register({"main": torch.fx.GraphModule({}, graph, "main")})

        def forward(self, x):
            return self.main(x)

        def _make_tracing_inputs(self, n):
            return [{"forward": (torch.randn(2, 2),)} for _ in range(n)]

    own, x = Own(), torch.randn(2, 2)
    same(own(x), x * 2 + 1)
    same((script(own) if how == "script" else trace_module(own))(x), x * 2 + 1)
