"""What calls of operators give a machine to do: kinds, FLOPs, bytes, the product that they are, variants."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchgraft
from torchgraft.analysis.simulate.kernels import Kernel, attention_flops, kernel_of, kind_of, type_of

aten = torch.ops.aten


def tensor(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def kernel(operator, *args, tf32=False, **kwargs):
    return kernel_of(operator, args, kwargs, operator(*args, **kwargs), tf32)


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        *((aten.mm.default, "matmul"), (aten.baddbmm.default, "matmul"), (aten.convolution.default, "convolution")),
        *((aten.convolution_backward.default, "convolution"), (aten.native_layer_norm.default, "norm")),
        *(
            (aten._softmax.default, "norm"),
            (aten.native_batch_norm.default, "norm"),
            (aten.sum.dim_IntList, "reduction"),
        ),
        *((aten.cumsum.default, "reduction"), (aten.max_pool2d_with_indices.default, "pooling")),
        *(
            (aten.upsample_nearest2d.default, "pooling"),
            (aten.embedding.default, "gather"),
            (aten.index.Tensor, "gather"),
        ),
        *(
            (aten.topk.default, "sort"),
            (aten.clone.default, "copy"),
            (aten.cat.default, "copy"),
            (aten._to_copy.default, "copy"),
        ),
        *((aten.zeros_like.default, "copy"), (aten.relu.default, "elementwise"), (aten.add_.Tensor, "elementwise")),
        *((aten.bernoulli.default, "elementwise"), (aten._foreach_add_.List, "elementwise")),
        *((aten._fused_adamw_.default, "elementwise"), (aten._scaled_dot_product_flash_attention.default, "attention")),
        *((aten._local_scalar_dense.default, "wait"), (aten.view.default, "nothing"), (aten.expand.default, "nothing")),
        *((aten.empty.memory_format, "nothing"), (aten._linalg_svd.default, "")),
    ],
)
def test_kinds(operator, kind):
    assert kind_of(operator) == kind


def test_products():
    found = kernel(aten.addmm.default, tensor(5), tensor(3, 4), tensor(4, 5))
    assert (found.sizes, found.variant, found.flops) == ((1, 3, 5, 4), "nn", 2 * 3 * 5 * 4 + 0 * found.flops)
    assert found.bytes == 4 * (5 + 12 + 20 + 15)
    weight = tensor(5, 4).t()
    assert kernel(aten.mm.default, tensor(3, 4), weight).variant == "nt"
    assert kernel(aten.bmm.default, tensor(7, 3, 4), tensor(7, 4, 5)).sizes == (7, 3, 5, 4)
    assert kernel(aten.mv.default, tensor(3, 4), tensor(4)).sizes == (1, 3, 1, 4)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_flops_and_bytes_of_products(rows, columns, depth, count):
    found = kernel(aten.bmm.default, tensor(count, rows, depth), tensor(count, depth, columns))
    assert found.flops == 2 * count * rows * columns * depth
    assert found.bytes == 4 * count * (rows * depth + depth * columns + rows * columns)
    assert found.sizes == (count, rows, columns, depth)


def convolved(shape, weight, stride=(1, 1), padding=(0, 0), transposed=False, groups=1, **types):
    args = (tensor(*shape), tensor(*weight), None, list(stride), list(padding), [1, 1], transposed, [0, 0], groups)
    return kernel(aten.convolution.default, *args, **types)


@pytest.mark.parametrize(
    ("options", "variant"),
    [
        ({"shape": (2, 8, 9, 9), "weight": (16, 8, 3, 3)}, "general"),
        ({"shape": (2, 8, 9, 9), "weight": (16, 8, 1, 1)}, "pointwise"),
        ({"shape": (2, 8, 9, 9), "weight": (16, 8, 1, 1), "stride": (2, 2)}, "strided"),
        ({"shape": (2, 8, 9, 9), "weight": (8, 1, 3, 3), "groups": 8}, "depthwise"),
        ({"shape": (2, 8, 9, 9), "weight": (16, 2, 3, 3), "groups": 4}, "grouped"),
        ({"shape": (2, 8, 9, 9), "weight": (8, 4, 2, 2), "transposed": True}, "transposed"),
    ],
)
def test_classes_of_convolutions(options, variant):
    found = convolved(**options)
    assert found.variant == variant and found.flops == 2 * torch.Size(found.sizes).numel() and found.images == 2


def test_a_convolution_as_a_product():
    found = convolved((2, 8, 9, 9), (16, 8, 3, 3))
    assert found.sizes == (1, 2 * 7 * 7, 16, 8 * 9) and found.window == 9
    assert convolved((2, 8, 9, 9), (16, 2, 3, 3), groups=4).sizes == (4, 2 * 7 * 7, 4, 2 * 9)
    last = tensor(2, 8, 9, 9).to(memory_format=torch.channels_last)
    args = (last, tensor(16, 8, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert kernel(aten.convolution.default, *args).variant == "general-last"


def test_types():
    assert kernel(aten.mm.default, tensor(2, 2), tensor(2, 2), tf32=True).type == "tf32"
    assert kernel(aten.add.Tensor, tensor(2), tensor(2), tf32=True).type == "fp32"
    half = tensor(2, 2, dtype=torch.float16)
    assert kernel(aten.mm.default, half, half, tf32=True).type == "fp16"
    assert type_of([torch.zeros(2, dtype=torch.int64), tensor(1, dtype=torch.bfloat16)]) == "bf16"
    assert type_of([]) == "fp32" and type_of(torch.zeros(1, dtype=torch.int8)) == "int8"


def test_norms_go_through_rows():
    image = tensor(2, 8, 5, 5)
    assert kernel(aten._softmax.default, tensor(6, 10), -1, False).rows == 6
    layer = kernel(aten.native_layer_norm.default, tensor(6, 10), [10], None, None, 1e-5)
    assert (layer.variant, layer.rows) == ("layer-norm", 6)
    plain = kernel(aten.native_batch_norm.default, image, None, None, *[tensor(8)] * 2, False, 0.1, 1e-5)
    assert (plain.variant, plain.rows) == ("batch-norm", 16)
    trains = kernel(aten.native_batch_norm.default, image, None, None, *[tensor(8)] * 2, True, 0.1, 1e-5)
    assert (trains.variant, trains.rows) == ("batch-norm-training", 8)


def test_reductions():
    assert kernel(aten.sum.default, tensor(6, 10)).variant == "all"
    assert kernel(aten.sum.dim_IntList, tensor(6, 10), [1]).variant == "inner"
    outer = kernel(aten.sum.dim_IntList, tensor(6, 10), [0])
    assert (outer.variant, outer.rows) == ("outer", 10)
    assert kernel(aten.cumsum.default, tensor(6, 10), 1).variant == "scan"


def test_copies():
    assert kernel(aten.clone.default, tensor(6, 10)).variant == "plain"
    assert kernel(aten.clone.default, tensor(6, 10).t(), memory_format=torch.contiguous_format).variant == "strided"
    assert kernel(aten.zeros.default, [6], device="meta").variant == "fill"
    assert kernel(aten.roll.default, tensor(4, 6, 6), [1, 1], [1, 2]).passes == 2


def test_of_rows_that_are_fetched_as_much_is_read_as_is_fetched():
    found = kernel(aten.embedding.default, tensor(100_000, 64), torch.zeros(3, dtype=torch.long, device="meta"))
    assert found.read < 2 * 3 * 64 * 4 + 100 and found.written == 3 * 64 * 4


def test_what_is_unknown_has_its_bytes():
    found = kernel(aten._linalg_svd.default, tensor(4, 16, 16))
    assert found.kind == "unknown" and found.flops == 0 and found.bytes >= 4 * 4 * 16 * 16 * 3


def test_an_operator_with_a_formula_of_the_user_is_known():
    @torch.library.custom_op("simulated::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    cube.register_fake(torch.empty_like)
    operator = torch.ops.simulated.cube.default
    assert kernel_of(operator, (tensor(8),), {}, tensor(8)).kind == "unknown"

    @torchgraft.flop_formula(operator)
    def flops(x, result):
        return 2 * x.numel()

    found = kernel_of(operator, (tensor(8),), {}, tensor(8))
    assert (found.kind, found.flops) == ("elementwise", 16)


def test_attention():
    assert attention_flops((2, 4, 4, 8), False) == 4 * 2 * 8 * 16
    assert attention_flops((2, 4, 4, 8), True) == 4 * 2 * 8 * (1 + 2 + 3 + 4)


def test_kernels_as_plain_values():
    found = convolved((2, 8, 9, 9), (16, 8, 3, 3))
    assert Kernel(**found.to_dict()) == found


def test_dimensions_of_one_do_not_make_a_kernel_slow():
    """The gates of one example lie together, as its result does; those of several do not."""
    aten = torch.ops.aten
    for batch, variant in ((1, ""), (4, "broadcast")):
        gate = torch.ones(batch, 24)[:, 8:16]
        kernel = kernel_of(aten.sigmoid.default, (gate,), {}, torch.ones(batch, 8))
        assert kernel is not None and kernel.variant == variant
