"""What a model asks Python about a traced value: the likeliest answer is given and guarded, or the question refused."""

from __future__ import annotations

import collections.abc
import copy
import functools
import logging
import numbers
import operator
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.ir.value_classes import likely_class


def branch(question: Any) -> Any:
    return lambda x: x * 2 if question(x) else x * 3


class TestClasses:
    @pytest.mark.parametrize(
        "question",
        [
            lambda x: isinstance(x, torch.Tensor),
            lambda x: isinstance(x, (int, float)),
            lambda x: torch.is_tensor(x),
            lambda x: x.__class__ is torch.Tensor,
            lambda x: isinstance(x.shape[0], int),
            lambda x: isinstance(x.size(0) * 2 + 1, int),
            lambda x: isinstance(x.shape, tuple),
            lambda x: isinstance(x.shape[1:], torch.Size),
            lambda x: isinstance(x.shape[0], numbers.Integral),
            lambda x: isinstance(x.dim(), int) and isinstance(x.dtype, torch.dtype),
            lambda x: isinstance(x.split(1), (tuple, list)),
            lambda x: isinstance(x, collections.abc.Mapping),
        ],
    )
    def test_the_answer_is_the_one_that_eager_gives(self, question) -> None:
        model = branch(question)
        assert torch.equal(fx.symbolic_trace(model)(torch.ones(2, 2)), model(torch.ones(2, 2)))

    def test_match_statements(self) -> None:
        def model(x):
            match x:
                case int() | float():
                    return x + 1
                case torch.Tensor():
                    return x + 2

        assert fx.symbolic_trace(model)(torch.ones(1)) == 3

    def test_another_kind_is_refused_when_the_program_runs(self) -> None:
        program = fx.symbolic_trace(branch(lambda x: isinstance(x, torch.Tensor)))
        with pytest.raises(fx.GuardError, match=r"expected a Tensor for 'x', got 2.0\n  at .*test_questions.py"):
            program(2.0)
        assert "'x' is a Tensor is True" in program.explain_guards() if hasattr(program, "explain_guards") else True
        assert [str(guard.condition) for guard in program.guards] == ["'x' is a Tensor"]

    def test_one_guard_for_many_questions(self) -> None:
        program = fx.symbolic_trace(lambda x: x * isinstance(x, torch.Tensor) * (not isinstance(x, int)))
        assert len(program.guards) == 1

    def test_annotations_of_inputs_are_believed(self) -> None:
        def model(x: torch.Tensor, scale: float, sizes: list[int]):
            return x * scale if isinstance(scale, float) and isinstance(sizes, list) else x

        program = fx.symbolic_trace(model)
        assert program(torch.ones(1), 3.0, [1]) == 3
        assert program.guards == []

    @pytest.mark.parametrize("annotation", [torch.Tensor | None, "torch.Tensor | None", "Optional[Tensor]", None])
    def test_what_is_annotated_as_several_things_or_not_at_all_is_checked(self, annotation) -> None:
        def model(x):
            return x if isinstance(x, torch.Tensor) else torch.zeros(1)

        model.__annotations__["x"] = annotation
        program = fx.symbolic_trace(model)
        assert program(torch.ones(1)) == 1
        with pytest.raises(fx.GuardError, match="'x'"):
            program(None)

    def test_a_default_of_none_is_stronger_than_an_annotation(self) -> None:
        def model(x, mask: torch.Tensor = None):
            return x if mask is None else x * mask

        program = fx.symbolic_trace(model)
        assert program(torch.ones(1), torch.full((1,), 3.0)) == 3
        with pytest.raises(fx.GuardError, match="mask"):
            program(torch.ones(1))

    @pytest.mark.parametrize(
        "made", [lambda x: torch.relu(x), lambda x: x.size(0), lambda x: x.shape, lambda x: x.dim()]
    )
    def test_what_can_be_of_one_class_only_is_not_checked(self, made) -> None:
        program = fx.symbolic_trace(lambda x: x + (1 if isinstance(made(x), torch.Tensor) else 2))
        assert program.guards == []
        assert program(torch.zeros(1)) == (1 if isinstance(made(torch.zeros(1)), torch.Tensor) else 2)

    def test_torch_functions_that_look_at_classes_leave_no_guard(self) -> None:
        program = fx.symbolic_trace(
            lambda x: torch.arange(x.shape[0]) + torch.zeros(x.shape[0]) + torch.full((2,), x.size(0))
        )
        assert program.guards == []

    def test_the_users_tracer_knows_a_proxy(self) -> None:
        seen = []

        class Asking(fx.Tracer):
            def create_arg(self, a: Any) -> Any:
                seen.append((isinstance(a, fx.Proxy), isinstance(a, torch.Tensor)))
                return super().create_arg(a)

        graph = Asking().trace(lambda x: x + 1)
        assert [node.name for node in graph.nodes] == ["x", "add", "output"]
        assert (True, False) in seen and (True, True) not in seen

    def test_a_proxy_outside_of_a_trace(self) -> None:
        proxy = fx.Proxy(fx.Graph().placeholder("x"))
        assert not isinstance(proxy, torch.Tensor)
        assert isinstance(proxy, fx.Proxy) and repr(proxy) == str(proxy) == f"{proxy}" == "Proxy(x)"
        assert len({proxy, copy.copy(proxy)}) == 2

    def test_likely_classes(self) -> None:
        program = fx.symbolic_trace(lambda x: (x.shape[0] // 2, x.size(), x.numel(), x.mul(2), x.tolist(), x.is_leaf))
        found = {node.name: likely_class(node) for node in program.graph.nodes}
        assert found["floordiv"] is int and found["size"] is torch.Size and found["numel"] is int
        assert found["mul"] is torch.Tensor and found["tolist"] is list


class TestAttributes:
    def test_asking_for_an_attribute_that_tensors_do_not_have(self) -> None:
        program = fx.symbolic_trace(lambda x: x * x.mask if hasattr(x, "mask") else x + getattr(x, "bias", 1))
        assert program(torch.zeros(1)) == 1
        marked = torch.zeros(1)
        marked.mask = torch.ones(1)
        with pytest.raises(fx.GuardError, match="'x' has an attribute 'mask'"):
            program(marked)

    def test_attributes_of_tensors_and_plain_reads_need_no_guard(self) -> None:
        program = fx.symbolic_trace(lambda x: (hasattr(x, "shape"), x.mask, getattr(x, "other")))  # noqa: B009
        assert program.guards == []
        assert [node.args[1] for node in program.graph.nodes if node.target is getattr] == ["mask", "other"]


class TestTexts:
    @pytest.mark.parametrize(
        "model",
        [
            lambda x: x * {"2": 1.0}.get(f"{x.shape[0]}", 2.0),
            lambda x: x * len(str(x.shape[0])),
            lambda x: x * len(repr(x)),
            lambda x: x * len("%s" % x.size(0)),  # noqa: UP031
            lambda x: x * len(f"{x.sum():.2f}"),
        ],
    )
    def test_a_text_that_may_decide_is_refused(self, model) -> None:
        with pytest.raises(fx.TraceError, match="text"):
            fx.symbolic_trace(model)

    def test_texts_for_people(self, capsys) -> None:
        def model(x):
            print(x, f"{x.shape}")
            logging.getLogger("nobody").info("%s", x)
            warnings.warn(f"shape {x.shape}", stacklevel=1)
            torch._assert(x.shape[0] == 2, f"expected 2, got {x.shape[0]}")
            if x is None:
                raise ValueError(f"no {x}")
            return x + 1

        with pytest.warns(UserWarning, match="Proxy"):
            program = fx.symbolic_trace(model)
        assert "Proxy(x)" in capsys.readouterr().out
        assert torch.equal(program(torch.ones(2)), torch.full((2,), 2.0))


@functools.cache
def remembered(n: int) -> Any:
    return n * 2


class TestKeys:
    @pytest.mark.parametrize(
        "model",
        [lambda x: {2: 1.0}.get(x.shape[0], 5.0) * x, lambda x: x * (x.size(0) in {1, 2}), lambda x: {x.numel(): x}],
    )
    def test_a_size_is_no_key(self, model) -> None:
        with pytest.raises(fx.TraceError):
            fx.symbolic_trace(model)

    def test_tensors_are_keys_by_identity_as_in_eager(self) -> None:
        program = fx.symbolic_trace(lambda x: {x: 3.0}[x] * x)
        assert program(torch.ones(1)) == 3

    def test_a_function_with_a_cache(self) -> None:
        assert fx.symbolic_trace(lambda x: x * remembered(x.shape[0]))(torch.ones(2)).tolist() == [4, 4]


class TestCopies:
    def test_copies_are_made_when_the_program_runs(self) -> None:
        program = fx.symbolic_trace(lambda x: (copy.copy(x), copy.deepcopy(x)))
        x = torch.ones(2)
        shallow, deep = program(x)
        assert shallow is not x and shallow.data_ptr() == x.data_ptr() and deep.data_ptr() != x.data_ptr()

    def test_pickling_is_refused(self) -> None:
        with pytest.raises(fx.TraceError, match="pickle"):
            fx.symbolic_trace(lambda x: pickle.loads(pickle.dumps(x)))


class TestIdentity:
    @pytest.mark.parametrize("given", [True, False])
    def test_a_flag_compared_by_identity(self, given) -> None:
        program = fx.symbolic_trace(lambda x, flag: x + 1 if flag is True or flag is False else x + flag)
        assert program(torch.ones(1), 2.0) == 3
        with pytest.raises(fx.GuardError, match=f"'flag' is {given}"):
            program(torch.ones(1), given)

    def test_a_module_with_a_call_of_its_own_is_refused(self) -> None:
        class Own(nn.Module):
            def __call__(self, x):
                return super().__call__(x) + 1

            def forward(self, x):
                return x * 2

        with pytest.raises(fx.TraceError, match="__call__ of its own"):
            fx.symbolic_trace(Own())
        around = fx.symbolic_trace(nn.Sequential(Own()))
        assert around(torch.ones(1)) == 3


class Batch:
    def __init__(self, values, mask=None) -> None:
        self.values, self.mask = values, mask


def test_an_attribute_that_is_compared_with_none_is_guarded() -> None:
    traced = fx.symbolic_trace(lambda batch: batch.values if batch.mask is None else batch.values * batch.mask)
    x = torch.rand(2)
    assert torch.equal(traced(Batch(x, torch.zeros(2))), torch.zeros(2))
    with pytest.raises(fx.GuardError, match="value for the argument 'batch.mask', and now it is None"):
        traced(Batch(x))


def test_an_attribute_of_an_object_that_nobody_asks_about_has_no_guard() -> None:
    traced = fx.symbolic_trace(lambda batch: batch.values * batch.mask)
    assert [node.target for node in traced.graph.nodes] == ["batch", getattr, getattr, operator.mul, "output"]


def test_a_forward_that_needs_what_hooks_leave_behind_is_refused() -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()
            self.relu.register_forward_hook(lambda module, args, output: found.append(output))

        def forward(self, x):
            self.relu(x)
            return found[-1]

    found: list[Any] = []
    with pytest.raises(
        fx.TraceError, match="(?s)needs what hooks leave behind: IndexError.*hooks of 'relu'.*capture"
    ) as caught:
        fx.symbolic_trace(Collecting())
    assert "return found[-1]" in str(caught.value)


def test_who_asks_for_a_trace_is_not_traced() -> None:
    traced = fx.symbolic_trace(lambda x, mask: x, concrete_args={"mask": None})
    other = traced
    assert traced is other  # a comparison that the trace must not take for one of the traced function
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]


def test_isinstance_is_answered_where_there_is_no_source() -> None:
    """Typed into an interpreter: which call is running cannot be read, only that `isinstance` may be called."""
    names: dict[str, Any] = {"torch": torch}
    exec("def function(x):\n    return x + 1 if isinstance(x, torch.Tensor) else x - 1\n", names)
    program = fx.symbolic_trace(names["function"])
    assert program(torch.ones(())).item() == 2
    with pytest.raises(fx.GuardError):
        program(1)
