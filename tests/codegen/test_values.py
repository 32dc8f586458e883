"""Values as source text: each must be written so that Python reads the same value back.
The layout of whole functions is in test_source.py.
"""

import collections
import enum
import math
import typing
from typing import NamedTuple

import pytest
import torch
from torch import nn

import torchgraft as fx
from tests.names import stable
from torchgraft.codegen.values import SourceGlobals
from torchgraft.ir.names import Namespace


class Pair(NamedTuple):
    first: object
    second: object


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Permission(enum.Flag):
    READ = 1
    WRITE = 2


class Odd:
    """Its repr is no Python, and equals another's."""

    def __repr__(self) -> str:
        return "<odd>"


class Number(float):
    pass


class Whole(int):
    pass


def own_function(x):
    return x


@pytest.fixture
def source() -> SourceGlobals:
    return SourceGlobals(Namespace())


def read_back(source: SourceGlobals, text: str):
    return eval(text, dict(source.values))


VALUES = [
    0, -3, 2.5, -0.0, 1e300, math.inf, -math.inf, True, None, ..., "text", "quote ' and \" and \n", b"bytes", 2 + 3j,
    torch.float16, torch.channels_last, torch.strided, torch.device("cpu"), torch.device("cuda", 1), range(1, 5, 2),
    (), (1,), (1, 2), [], [1, [2]], {}, {"k": 1, 3: (4,)}, slice(1, None, 2), Pair(1, [2]),
    Color.RED, Level.HIGH, Permission.READ, torch.relu, nn.functional.gelu, len, own_function, torch.ops.aten.add.Tensor,
    int, torch.Tensor, nn.Linear, collections.OrderedDict,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=stable)
def test_a_value_is_read_back_as_itself(source: SourceGlobals, value) -> None:
    result = read_back(source, source.text(value))
    assert result == value
    assert type(result) is type(value)


def test_nan_is_read_back(source: SourceGlobals) -> None:
    assert math.isnan(read_back(source, source.text(math.nan)))


def test_the_sign_of_zero_is_kept(source: SourceGlobals) -> None:
    assert math.copysign(1, read_back(source, source.text(-0.0))) == -1


@pytest.mark.parametrize("value", [Odd(), Number(2.5), Whole(2)], ids=["odd", "number", "whole"])
def test_what_has_no_literal_becomes_a_global(source: SourceGlobals, value) -> None:
    assert read_back(source, source.text(value)) is value


def test_two_objects_with_one_repr_are_told_apart(source: SourceGlobals) -> None:
    first, second = Odd(), Odd()
    texts = source.text(first), source.text(second)
    assert texts[0] != texts[1]
    assert [read_back(source, text) for text in texts] == [first, second]


def test_equal_values_of_two_types_are_told_apart(source: SourceGlobals) -> None:
    values = [Number(2), Whole(2)]
    texts = [source.text(value) for value in values]
    assert [type(read_back(source, text)) for text in texts] == [Number, Whole]


def test_a_combination_of_flags(source: SourceGlobals) -> None:
    value = Permission.READ | Permission.WRITE
    assert read_back(source, source.text(value)) is value


@pytest.mark.parametrize("value", [complex(0, math.inf), complex(1, -math.inf)])
def test_complex_numbers_that_are_not_finite(source: SourceGlobals, value: complex) -> None:
    assert read_back(source, source.text(value)) == value


def test_two_classes_of_one_name_are_told_apart(source: SourceGlobals) -> None:
    other = enum.Enum("Color", {"RED": 7})
    texts = source.text(Color.RED), source.text(other.RED)
    assert [read_back(source, text) for text in texts] == [Color.RED, other.RED]


def test_a_tensor_is_refused_with_the_remedy(source: SourceGlobals) -> None:
    with pytest.raises(fx.GraphError, match=r"tensor of shape \(2, 3\).*get_attr"):
        source.text(torch.ones(2, 3))


def test_nodes_are_written_by_name(source: SourceGlobals) -> None:
    node = fx.Graph().placeholder("x")
    assert source.text([node, {"k": (node,)}]) == "[x, {'k': (x,)}]"


class TestFunctions:
    @pytest.mark.parametrize(
        ("function", "text"),
        [
            (torch.relu, "torch.relu"),
            (nn.functional.relu, "torch.nn.functional.relu"),
            (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        ],
    )
    def test_what_lies_under_torch_is_written_by_its_path(self, source: SourceGlobals, function, text: str) -> None:
        assert source.function(function) == text

    def test_a_builtin_is_written_by_its_name(self, source: SourceGlobals) -> None:
        assert source.function(len) == "len"

    def test_a_function_that_only_claims_to_be_torchs_gets_a_global(self, source: SourceGlobals) -> None:
        def relu(x):
            return x

        relu.__module__ = "torch"
        text = source.function(relu)
        assert text != "torch.relu"
        assert read_back(source, text) is relu

    def test_two_functions_of_one_name(self, source: SourceGlobals) -> None:
        def make():
            def helper(x):
                return x

            return helper

        first, second = make(), make()
        texts = [source.function(first), source.function(second), source.function(first)]
        assert texts[0] == texts[2] != texts[1]
        assert [read_back(source, text) for text in texts] == [first, second, first]

    def test_a_global_never_hides_a_node(self) -> None:
        names = Namespace()
        names._used.add("len")
        source = SourceGlobals(names)
        text = source.function(len)
        assert text != "len"
        assert source.values[text] is len


class TestAnnotations:
    @pytest.mark.parametrize(
        "annotation",
        [
            int,
            torch.Tensor,
            type(None),
            list[int],
            dict[str, torch.Tensor],
            tuple[int, ...],
            typing.List[torch.Tensor],  # noqa: UP006
            typing.Dict[str, int],  # noqa: UP006
            typing.Optional[torch.Tensor],  # noqa: UP045
            typing.Union[int, str],  # noqa: UP007
            typing.Any,
            int | None,
            typing.Literal["a", 3],
            nn.Linear,
            Pair,
        ],
        ids=str,
    )
    def test_an_annotation_is_read_back(self, source: SourceGlobals, annotation) -> None:
        assert read_back(source, source.annotation(annotation)) == annotation

    def test_a_forward_reference_stays_text(self, source: SourceGlobals) -> None:
        assert source.annotation("Later") == "'Later'"

    def test_an_empty_tuple_type(self, source: SourceGlobals) -> None:
        assert source.annotation(()) == "()"


def test_every_value_runs_in_a_program() -> None:
    for value in VALUES:
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(Pair, (x, value)))
        assert fx.GraphModule(nn.Module(), graph)(1) == Pair(1, value)
