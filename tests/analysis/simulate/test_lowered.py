"""Norms folded into layers and chains made one, on steps written by hand."""

from hypothesis import given
from hypothesis import strategies as st

from torchgraft.analysis.simulate.clocks import Step
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.lowered import lowered_steps

SIZE = 400


def step(kind, read, made, operator="", variant="", phase="forward", **options):
    operator = operator or f"aten.{kind}.default"
    kernel = Kernel(operator, kind, "fp32", 100, SIZE * len(read), SIZE, variant=variant, elements=100, **options)
    touched = [(memory, SIZE, False) for memory in read] + [(memory, SIZE, True) for memory in made]
    return Step(operator, kernel, tuple(touched), f"node{made}", phase)


def kinds(steps):
    return [step.kernel and step.kernel.kind for step in lowered_steps(steps)]


def test_a_chain_is_read_once_and_written_once():
    steps = [step("elementwise", [0], [1]), step("elementwise", [1, 9], [2]), step("elementwise", [2], [3])]
    *others, last = lowered_steps(steps)
    assert [one.kernel for one in others] == [None, None]
    assert (last.kernel.read, last.kernel.written, last.kernel.flops) == (2 * SIZE, SIZE, 300)
    assert last.node == "node[3]" and {memory for memory, _, _ in last.touched} == {0, 9, 3}


def test_what_is_used_later_is_written():
    steps = [step("elementwise", [0], [1]), step("elementwise", [1], [2]), step("matmul", [1, 2], [3])]
    assert lowered_steps(steps)[1].kernel.written == 2 * SIZE


def test_writes_in_place():
    steps = [step("elementwise", [0], [1]), step("elementwise", [1], []), step("reduction", [1], [2])]
    found = lowered_steps(steps)
    assert found[0].kernel is None and (found[1].kernel.read, found[1].kernel.written) == (SIZE, SIZE)


def test_what_does_not_follow_stays_apart():
    apart = [step("elementwise", [0], [1]), step("elementwise", [5], [2])]
    assert kinds(apart) == ["elementwise"] * 2
    between = [step("elementwise", [0], [1]), step("matmul", [7], [8]), step("elementwise", [1], [2])]
    assert kinds(between) == ["elementwise", "matmul", "elementwise"]
    turned = [step("elementwise", [0], [1]), step("copy", [1], [2], variant="strided")]
    assert kinds(turned) == ["elementwise", "copy"]
    updates = [step("elementwise", [0], [1], phase="optimizer"), step("elementwise", [1], [2], phase="optimizer")]
    assert kinds(updates) == ["elementwise"] * 2


def norm(read, made):
    return step("norm", read, made, "aten._native_batch_norm_legit_no_training.default", "batch-norm")


def test_a_norm_is_the_bias_of_the_layer_before():
    without = [step("convolution", [0], [1], "aten.convolution.default"), norm([1], [2])]
    assert kinds(without) == ["convolution", "elementwise"]
    bias = Step(
        "",
        Kernel("aten.add_", "elementwise", "fp32", 100, SIZE, SIZE, elements=100),
        without[0].touched,
        "c",
        "forward",
    )
    assert kinds([without[0], bias, norm([1], [2])]) == ["convolution", "elementwise", None]
    product = step("matmul", [0], [1], "aten.addmm.default")
    assert kinds([product, norm([1], [2])]) == ["matmul", None]
    activated = [without[0], bias, norm([1], [2]), step("elementwise", [2], [3]), step("matmul", [3], [4])]
    assert kinds(activated) == ["convolution", None, None, "elementwise", "matmul"]


def test_a_norm_of_what_others_read_too_is_work_of_its_own():
    product = step("matmul", [0], [1], "aten.addmm.default")
    assert kinds([product, norm([1], [2]), step("reduction", [1], [3])]) == ["matmul", "elementwise", "reduction"]
    assert kinds([step("pooling", [0], [1]), norm([1], [2])]) == ["pooling", "elementwise"]
    trains = step("norm", [1], [2], "aten.native_batch_norm.default", "batch-norm-training")
    assert kinds([product, trains]) == ["matmul", "norm"]


KINDS = st.sampled_from(["elementwise", "copy", "matmul", "reduction"])


@given(st.lists(st.tuples(KINDS, st.lists(st.integers(0, 8), min_size=1, max_size=3, unique=True)), max_size=15))
def test_nothing_is_lost_and_no_byte_is_added(entries):
    steps = [step(kind, read, [100 + place]) for place, (kind, read) in enumerate(entries)]
    found = lowered_steps(steps)
    before, after = ([one.kernel for one in these if one.kernel is not None] for these in (steps, found))
    assert len(found) == len(steps) and [one.node for one in found] == [one.node for one in steps]
    assert sum(kernel.flops for kernel in after) == sum(kernel.flops for kernel in before)
    assert sum(kernel.bytes for kernel in after) <= sum(kernel.bytes for kernel in before)
