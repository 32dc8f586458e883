"""Effects of operators of torch, read off their schemas: every operator that has simple arguments, and the naming laws."""

import types
import warnings

import pytest
import torch
import torch.nn.functional as F

from torchgraft.analysis.effects import effects_of, is_impure
from torchgraft.analysis.effects.operators import operator_of_function, operator_of_method
from torchgraft.ir.graph import Graph

aten = torch.ops.aten


def graph_with_inputs(count: int = 5):
    graph = Graph()
    return graph, [graph.placeholder(f"x{i}") for i in range(count)]


def effects_of_function(target, *arguments, **keywords):
    """Strings stand for input nodes."""
    graph, inputs = graph_with_inputs()
    names = {node.name: node for node in inputs}

    def node(value):
        if isinstance(value, list | tuple):
            return type(value)(node(item) for item in value)
        return names.get(value, value) if isinstance(value, str) else value

    made = graph.call_function(target, tuple(map(node, arguments)), {k: node(v) for k, v in keywords.items()})
    return effects_of(made)


def written(target, *arguments, **keywords) -> set[str]:
    effects = effects_of_function(target, *arguments, **keywords)
    assert not effects.unknown, effects.reasons
    return {str(place) for place in effects.writes}


# Target, arguments, keywords, what is written.
WRITES = [
    (torch.relu_, ("x0",), {}, {"x0"}),
    (torch.relu, ("x0",), {}, set()),
    (torch.add, ("x0", "x1"), {}, set()),
    (torch.add, ("x0", "x1"), {"alpha": 2}, set()),
    (torch.add, ("x0", "x1"), {"out": "x2"}, {"x2"}),
    (torch.add, ("x0", "x1"), {"out": None}, set()),
    (torch.max, ("x0", 1), {"out": ("x1", "x2")}, {"x1", "x2"}),
    (torch.sort, ("x0",), {}, set()),
    (torch.sort, ("x0",), {"out": ("x1", "x2")}, {"x1", "x2"}),
    (torch.rand, (2,), {"out": "x0"}, {"x0"}),
    (torch._foreach_mul_, (["x0", "x1"], 2.0), {}, {"x0", "x1"}),
    (torch._foreach_mul, (["x0", "x1"], 2.0), {}, set()),
    (torch.clamp_, ("x0",), {"min": 0}, {"x0"}),
    (torch.embedding_renorm_, ("x0", "x1", 1.0, 2.0), {}, {"x0"}),
    (torch._C._nn.hardtanh_, ("x0",), {}, {"x0"}),
    (torch._C._nn.gelu, ("x0",), {}, set()),
    (torch._C._nn.rrelu_with_noise, ("x0", "x1"), {}, {"x1"}),
    (torch.special.expit, ("x0",), {}, set()),
    (torch.linalg.norm, ("x0",), {"out": "x1"}, {"x1"}),
    (torch.fft.fft, ("x0",), {}, set()),
    (torch.Tensor.mul_, ("x0", 2), {}, {"x0"}),
    (torch.Tensor.mul, ("x0", 2), {}, set()),
    (torch.Tensor.__setitem__, ("x0", 0, 1), {}, {"x0"}),
    (torch.Tensor.__getitem__, ("x0", 0), {}, set()),
    (torch.Tensor.__iadd__, ("x0", 1), {}, {"x0"}),
    (aten.mul_.Tensor, ("x0", "x1"), {}, {"x0"}),
    (aten.mul_, ("x0", "x1"), {}, {"x0"}),
    (aten.mul.Tensor, ("x0", "x1"), {}, set()),
    (aten.mul.out, ("x0", "x1"), {"out": "x2"}, {"x2"}),
    (aten.mul, ("x0", "x1"), {"out": "x2"}, {"x2"}),
    (aten.split_copy.Tensor_out, ("x0", 1), {"out": ["x1", "x2"]}, {"x1", "x2"}),
    (aten.unsafe_split, ("x0", 1), {}, set()),
    (aten.copy_, ("x0", "x1"), {}, {"x0"}),
    (aten.index_put_, ("x0", ["x1"], "x2"), {}, {"x0"}),
    (aten.native_batch_norm.default, ("x0", "x1", "x2", "x3", "x4", True, 0.1, 1e-5), {}, {"x3", "x4"}),
    (aten.native_batch_norm.default, ("x0", "x1", "x2", "x3", "x4", False, 0.1, 1e-5), {}, set()),
    (aten.native_batch_norm.default, ("x0", "x1", "x2", None, None, True, 0.1, 1e-5), {}, set()),
    (aten._native_batch_norm_legit_no_training.default, ("x0", "x1", "x2", "x3", "x4", 0.1, 1e-5), {}, set()),
    (aten._native_batch_norm_legit.default, ("x0", "x1", "x2", "x3", "x4", True, 0.1, 1e-5), {}, {"x3", "x4"}),
    (aten.native_batch_norm_backward.default, ("x0", "x1", "x2", "x3", "x4", None, None, True, 1e-5, []), {}, set()),
    (torch.batch_norm, ("x0", None, None, "x1", "x2", True, 0.1, 1e-5, False), {}, {"x1", "x2"}),
    (torch.batch_norm, ("x0", None, None, "x1", "x2", False, 0.1, 1e-5, False), {}, set()),
    (torch.batch_norm, ("x0", None, None, "x1", "x2", "x3", 0.1, 1e-5, False), {}, {"x1", "x2"}),
    (torch.instance_norm, ("x0", None, None, "x1", "x2", True, 0.1, 1e-5, False), {}, {"x1", "x2"}),
    (F.batch_norm, ("x0", "x1", "x2"), {"training": True}, {"x1", "x2"}),
    (F.batch_norm, ("x0", "x1", "x2"), {}, set()),
    (F.relu, ("x0",), {"inplace": True}, {"x0"}),
    (F.relu, ("x0", True), {}, {"x0"}),
    (F.relu, ("x0",), {}, set()),
    (F.dropout, ("x0", 0.5, True, True), {}, {"x0"}),
    (F.dropout, ("x0", 0.5, False, True), {}, set()),
    (F.embedding, ("x0", "x1"), {}, set()),
    (F.embedding, ("x0", "x1"), {"max_norm": 1.0}, {"x1"}),
    (torch.dropout_, ("x0", 0.5, True), {}, {"x0"}),
    (torch.tensor, (1.0,), {}, set()),
    (torch.as_tensor, ("x0",), {}, set()),
    (torch.is_grad_enabled, (), {}, set()),
]


@pytest.mark.parametrize("target, arguments, keywords, expected", WRITES)
def test_written_arguments(target, arguments, keywords, expected):
    assert written(target, *arguments, **keywords) == expected


# Target, arguments, keywords, whether random numbers are drawn.
DRAWS = [
    (torch.rand, (2, 3), {}, True),
    (torch.rand_like, ("x0",), {}, True),
    (torch.randint, (0, 5, (2,)), {}, True),
    (torch.randperm, (5,), {}, True),
    (torch.normal, (0.0, 1.0, (2,)), {}, True),
    (torch.bernoulli, ("x0",), {}, True),
    (torch.bernoulli, ("x0", 0.0), {}, True),
    (torch.multinomial, ("x0", 1), {}, True),
    (torch.poisson, ("x0",), {}, True),
    (torch.empty, (2,), {}, False),
    (torch.zeros, (2,), {}, False),
    (torch.dropout, ("x0", 0.5, True), {}, True),
    (torch.dropout, ("x0", 0.5, False), {}, False),
    (torch.dropout, ("x0", 0.0, True), {}, False),
    (torch.dropout, ("x0", 0.5, "x1"), {}, True),
    (torch.dropout, ("x0",), {"p": 0.5, "train": False}, False),
    (torch.native_dropout, ("x0", 0.0, True), {}, True),
    (torch.native_dropout, ("x0", 0.5, False), {}, False),
    (torch.rrelu, ("x0",), {}, False),
    (torch.rrelu, ("x0", 0.1, 0.3, True), {}, True),
    (torch.rrelu, ("x0",), {"training": True}, True),
    (F.rrelu, ("x0",), {}, False),
    (F.rrelu, ("x0",), {"training": True}, True),
    (F.dropout, ("x0",), {}, True),
    (F.dropout, ("x0",), {"training": False}, False),
    (F.dropout2d, ("x0",), {"training": False}, False),
    (F.alpha_dropout, ("x0",), {}, False),
    (F.alpha_dropout, ("x0",), {"training": True}, True),
    (F.gumbel_softmax, ("x0",), {}, True),
    (F.scaled_dot_product_attention, ("x0", "x1", "x2"), {}, False),
    (F.scaled_dot_product_attention, ("x0", "x1", "x2"), {"dropout_p": 0.1}, True),
    (F.scaled_dot_product_attention, ("x0", "x1", "x2"), {"dropout_p": "x3"}, True),
    (F.fractional_max_pool2d, ("x0", 2), {"output_size": 2}, True),
    (aten.rand.default, ([2],), {}, True),
    (aten.rand, ([2],), {}, True),
    (aten.native_dropout.default, ("x0", 0.5, True), {}, True),
    (aten.uniform_.default, ("x0",), {}, True),
]


@pytest.mark.parametrize("target, arguments, keywords, expected", DRAWS)
def test_random_draws(target, arguments, keywords, expected):
    effects = effects_of_function(target, *arguments, **keywords)
    assert not effects.unknown
    assert effects.random is expected


def test_a_random_draw_may_be_taken_for_pure():
    graph, (x, *_) = graph_with_inputs()
    node = graph.call_function(torch.rand_like, (x,))
    assert is_impure(node)
    assert not is_impure(node, impure_random=False)
    assert is_impure(graph.call_method("uniform_", (x,)), impure_random=False)


@pytest.mark.parametrize(
    "target, arguments",
    [
        (torch._assert, ("x0", "message")),
        (torch._assert_async, ("x0",)),
        (torch._check, ("x0",)),
        (aten._assert_async.msg, ("x0", "message")),
        (aten._assert_scalar.default, ("x0", "message")),
        (aten._assert_tensor_metadata.default, ("x0",)),
        (aten.sym_constrain_range.default, ("x0",)),
        (aten._print.default, ("message",)),
        (aten._linalg_check_errors.default, ("x0", "name")),
        (torch.ops.profiler._record_function_enter.default, ("name",)),
        (torch.manual_seed, (0,)),
        (torch.set_grad_enabled, (False,)),
        (torch._C._set_grad_enabled, (False,)),
        (torch.amp._enter_autocast, ("cpu",)),
        (torch.set_num_threads, (1,)),
        (torch.autograd.backward, ("x0",)),
        (torch.save, ("x0", "path")),
        (print, ("x0",)),
        (setattr, ("x0", "grad", None)),
        (exec, ("pass",)),
        (open, ("path", "w")),
    ],
)
def test_calls_made_for_their_effect_stay(target, arguments):
    assert effects_of_function(target, *arguments)


METHODS_THAT_WRITE = [
    "mul_", "relu_", "copy_", "requires_grad_", "retain_grad", "resize_", "set_", "share_memory_", "apply_",
    "__setitem__", "__iadd__", "__ior__", "__imatmul__", "__delitem__", "__setattr__",
    "append", "extend", "insert", "pop", "clear", "update", "setdefault", "remove", "reverse", "discard",
    "backward", "register_hook", "index_put_", "_copy_from", "no_such_method",
]  # fmt: skip
METHODS_THAT_DO_NOT = [
    "mul", "relu", "clone", "detach", "view", "sort", "split", "unbind", "norm", "unique", "numpy", "tolist", "item",
    "float", "half", "cuda", "cpu", "to", "type", "size", "dim", "numel", "is_contiguous", "new_tensor", "add",
    "__getitem__", "__add__", "__len__", "__eq__", "items", "keys", "values", "get", "copy", "count", "format",
    "startswith", "is_floating_point", "data_ptr", "unflatten", "stft",
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS_THAT_WRITE)
def test_methods_that_write_stay(name):
    graph, (x, y, *_) = graph_with_inputs()
    assert is_impure(graph.call_method(name, (x, y, y)))


@pytest.mark.parametrize("name", METHODS_THAT_DO_NOT)
def test_methods_that_only_compute_do_not(name):
    graph, (x, y, *_) = graph_with_inputs()
    more = {"split": (1,), "unflatten": (0, (2, 2)), "stft": (4,)}.get(name, ())
    keywords = {"return_complex": True} if name == "stft" else {}
    assert not effects_of(graph.call_method(name, (x, *more), keywords))


def test_random_methods():
    graph, (x, *_) = graph_with_inputs()
    assert effects_of(graph.call_method("bernoulli", (x,))).random
    effects = effects_of(graph.call_method("normal_", (x,)))
    assert effects.random and effects.writes == {x}


def test_the_naming_law_of_tensor_methods_holds():
    """Methods without a schema are judged by their name, which is right as long as this holds for those with one."""
    exceptions = {"record_stream", "retain_grad", "sort"}
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if not schema.name.startswith("aten::") or not hasattr(torch.Tensor, name) or name in exceptions:
            continue
        writes = any(a.alias_info is not None and a.alias_info.is_write and not a.kwarg_only for a in schema.arguments)
        announced = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        assert writes == announced, schema


def test_every_bound_operator_is_found():
    spaces = [torch._C._VariableFunctions, torch._C._nn, torch._C._special, torch._C._linalg, torch._C._fft]
    for space in spaces:
        for name in dir(space):
            function = getattr(space, name)
            if isinstance(function, types.BuiltinFunctionType) and not name.startswith("__"):
                operator = operator_of_function(function)
                assert operator is not None
                if name.endswith("_"):
                    assert not operator.is_plain


def test_every_in_place_method_is_known_to_write():
    for name in dir(torch.Tensor):
        if name.endswith("_") and not name.endswith("__") and not hasattr(getattr(torch.Tensor, name), "__code__"):
            operator = operator_of_method(name)
            assert operator is None or not operator.is_plain, name


# ---- custom operators ----


@torch.library.custom_op("torchgraft_tests::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("torchgraft_tests::scale_into", mutates_args={"out"})
def scale_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


@torch.library.custom_op("torchgraft_tests::count_up", mutates_args={"counter"})
def count_up(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    counter += 1
    return x * 2


@torch.library.custom_op("torchgraft_tests::tell", mutates_args=())
def tell(x: torch.Tensor) -> None:
    warnings.warn("told", stacklevel=1)


def test_custom_operators_are_known_by_their_schemas():
    assert written(scale, "x0", 2.0) == set()
    assert written(scale_into, "x0", "x1") >= {"x1"}
    assert written(count_up, "x0", "x1") == {"x1"}
    assert effects_of_function(tell, "x0")
    assert written(torch.ops.torchgraft_tests.count_up, "x0", "x1") == {"x1"}
    assert written(torch.ops.torchgraft_tests.count_up.default, "x0", counter="x1") == {"x1"}
    assert written(torch.ops.torchgraft_tests.scale.default, "x0", 2.0) == set()


def test_effects_declared_to_torch_library_are_honoured():
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    @torch.library.custom_op("torchgraft_tests::declared", mutates_args=())
    def declared(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    handle = _register_effectful_op("torchgraft_tests::declared", _EffectType.ORDERED)
    try:
        assert effects_of_function(torch.ops.torchgraft_tests.declared.default, "x0")
    finally:
        handle.destroy()


def test_results_that_share_memory_are_known():
    x = "x0"
    assert effects_of_function(torch.relu, x).shares == set()
    for target, arguments in [
        (torch.reshape, (x, (2,))),
        (torch.transpose, (x, 0, 1)),
        (torch.unbind, (x,)),
        (torch.broadcast_tensors, (x,)),
        (torch.dropout, (x, 0.5, False)),
        (torch.Tensor.float, (x,)),
        (torch.Tensor.contiguous, (x,)),
        (torch.Tensor.data.__get__, (x,)),
        (aten.view.default, (x, [2])),
        (aten.unsafe_split.Tensor, (x, 1)),
    ]:
        assert {str(place) for place in effects_of_function(target, *arguments).shares} >= {"x0"}, target
