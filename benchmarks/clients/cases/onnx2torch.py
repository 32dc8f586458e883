"""onnx2torch builds a graph module for each ONNX model; operators, shared initializers, several outputs, wrapped functions."""

import numpy
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from benchmarks.clients.case import each, nodes, same
from benchmarks.coverage.torchvision_models import import_torchvision

import_torchvision()
from onnx2torch import convert  # noqa: E402


def model_of(operators, inputs, outputs, initializers=()):
    def value(name, shape):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        operators,
        "graph",
        [value(name, shape) for name, shape in inputs.items()],
        [value(name, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in initializers],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


UNARY = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Exp": torch.exp, "Abs": torch.abs, "Neg": torch.neg,
    "Floor": torch.floor, "Ceil": torch.ceil, "Sqrt": torch.sqrt, "Erf": torch.erf, "Sin": torch.sin, "Cos": torch.cos,
    "Softplus": torch.nn.functional.softplus, "Softsign": torch.nn.functional.softsign, "Sign": torch.sign,
    "Reciprocal": torch.reciprocal, "Log": torch.log, "Identity": lambda x: x, "Elu": torch.nn.functional.elu,
    "LeakyRelu": lambda x: torch.nn.functional.leaky_relu(x, 0.01),
}  # fmt: skip
BINARY = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
    "MatMul": torch.matmul,
    "Pow": torch.pow,
}


@each(*UNARY)
def case_unary(name):
    model = model_of([helper.make_node(name, ["x"], ["y"])], {"x": [2, 3]}, {"y": [2, 3]})
    x = torch.rand(2, 3) + 0.5
    converted = convert(model)
    same(converted(x), UNARY[name](x))
    return nodes(converted.graph)


@each(*BINARY)
def case_binary(name):
    model = model_of([helper.make_node(name, ["a", "b"], ["y"])], {"a": [3, 3], "b": [3, 3]}, {"y": [3, 3]})
    a, b = torch.rand(3, 3) + 0.5, torch.rand(3, 3) + 0.5
    converted = convert(model)
    same(converted(a, b), BINARY[name](a, b))
    return nodes(converted.graph)


@each("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd")
def case_reduction(name):
    if name == "ReduceSum":
        axes = [("axes", numpy.array([1], dtype=numpy.int64))]
        node = helper.make_node(name, ["x", "axes"], ["y"], keepdims=0)
    else:
        axes, node = [], helper.make_node(name, ["x"], ["y"], axes=[1], keepdims=0)
    converted = convert(model_of([node], {"x": [2, 3]}, {"y": [2]}, axes))
    x = torch.rand(2, 3)
    expected = {
        "ReduceSum": x.sum(1), "ReduceMean": x.mean(1), "ReduceMax": x.amax(1), "ReduceMin": x.amin(1),
        "ReduceL2": x.norm(dim=1), "ReduceProd": x.prod(1),
    }[name]  # fmt: skip
    same(converted(x), expected)
    return nodes(converted.graph)


def two_layers():
    weights = [("w", numpy.ones((4, 3), dtype=numpy.float32)), ("b", numpy.ones(4, dtype=numpy.float32))]
    operators = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Add", ["r", "b"], ["y"]),
    ]
    return model_of(operators, {"x": [2, 3]}, {"y": [2, 4]}, weights)


@each(False, True)
def case_layers_and_shared_initializers(named):
    converted = convert(two_layers(), save_input_names=named, attach_onnx_mapping=True)
    x = torch.randn(2, 3)
    same(converted(x), torch.relu(x @ torch.ones(3, 4) + 1) + 1)
    mapped = [hasattr(module, "onnx_mapping") for name, module in converted.named_children() if name != "initializers"]
    return [nodes(converted.graph), sorted(converted.state_dict()), mapped]


def case_convolution():
    weights = [("w", numpy.ones((4, 3, 3, 3), dtype=numpy.float32))]
    operators = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["p"], ["g"]),
        helper.make_node("Flatten", ["g"], ["y"]),
    ]
    converted = convert(model_of(operators, {"x": [1, 3, 8, 8]}, {"y": [1, 4]}, weights))
    x = torch.randn(1, 3, 8, 8)
    expected = torch.nn.functional.max_pool2d(torch.nn.functional.conv2d(x, torch.ones(4, 3, 3, 3), padding=1), 2)
    same(converted(x), expected.mean((2, 3)))
    return [nodes(converted.graph), sorted(converted.state_dict())]


def case_several_outputs():
    operators = [helper.make_node("Split", ["x"], ["a", "b"], axis=1), helper.make_node("Relu", ["a"], ["c"])]
    operators.append(helper.make_node("Tanh", ["b"], ["d"]))
    converted = convert(model_of(operators, {"x": [2, 4]}, {"c": [2, 2], "d": [2, 2]}))
    x = torch.randn(2, 4)
    same(list(converted(x)), [x[:, :2].relu(), x[:, 2:].tanh()])
    return nodes(converted.graph)


@each("compile", "export", "pickle", "train", "edit")
def case_after_conversion(what):
    import copy
    import pickle

    converted = convert(two_layers())
    x = torch.randn(2, 3)
    expected = converted(x)
    if what == "compile":
        same(torch.compile(converted, backend="eager")(x), expected)
    elif what == "export":
        same(torch.export.export(converted, (x,)).module()(x), expected)
    elif what == "pickle":
        same(pickle.loads(pickle.dumps(converted))(x), expected)
        same(copy.deepcopy(converted)(x), expected)
    elif what == "train":
        converted(x).sum().backward()
        return [name for name, parameter in converted.named_parameters() if parameter.grad is not None]
    else:
        for node in list(converted.graph.nodes):
            if node.op == "call_module" and "elu" in str(node.target).lower():
                node.replace_all_uses_with(node.args[0])
                converted.graph.erase_node(node)
        converted.graph.lint()
        converted.recompile()
        same(converted(x), x @ torch.ones(3, 4) + 2)
        return nodes(converted.graph)


def case_name_that_is_no_identifier():
    operators = [helper.make_node("Relu", ["x:0"], ["y"])]
    model = model_of(operators, {"x:0": [2]}, {"y": [2]})
    same(convert(model)(torch.ones(2)), torch.ones(2))
    try:
        convert(model, save_input_names=True)
    except ValueError as error:
        return str(error)


def case_checked_model():
    onnx.checker.check_model(two_layers())
    return type(convert(two_layers())).__name__
