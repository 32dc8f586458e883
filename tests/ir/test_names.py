"""Names: which identifiers a graph hands out, and in which order.
How nodes get and change theirs is in test_node.py and test_graph.py.
"""

import builtins
import keyword

import pytest

from torchgraft.ir.names import STANDARD_GLOBALS, Namespace, is_legal_name, snake_case


@pytest.mark.parametrize(
    ("text", "expected"),
    [("GlobalPool", "global_pool"), ("relu", "relu"), ("ReLU", "re_lu"), ("BatchNorm2d", "batch_norm2d"), ("X", "x")],
)
def test_snake_case(text: str, expected: str) -> None:
    assert snake_case(text) == expected


@pytest.mark.parametrize(
    ("wish", "given"),
    [
        ("layer1.0.conv", "layer1_0_conv"),
        ("0", "_0"),
        ("a-b c", "a_b_c"),
        ("", "_unnamed"),
        ("*args", "_args"),
        ("_1", "_1"),
        ("é", "_"),
    ],
)
def test_wishes_become_identifiers(wish: str, given: str) -> None:
    assert Namespace().create_name(wish) == given


RESERVED = sorted({*keyword.kwlist, *STANDARD_GLOBALS, *vars(builtins)})


def test_none_is_never_given_away() -> None:
    assert Namespace().create_name("None") == "None_1"


@pytest.mark.parametrize("name", RESERVED)
def test_names_that_code_relies_on_are_never_given_away(name: str) -> None:
    given = Namespace().create_name(name)
    assert given != name
    assert is_legal_name(given)
    assert not is_legal_name(name)


@pytest.mark.parametrize("name", ["a.b", "1a", "", "a b", "class", "len", "torch", "inf", "fx_pytree"])
def test_illegal_names(name: str) -> None:
    assert not is_legal_name(name)


@pytest.mark.parametrize("name", ["x", "_x", "relu_1", "match", "type_1"])
def test_legal_names(name: str) -> None:
    assert is_legal_name(name)


class TestNumbering:
    def test_repeated_wishes_are_numbered_from_one(self) -> None:
        names = Namespace()
        assert [names.create_name("relu") for _ in range(3)] == ["relu", "relu_1", "relu_2"]

    def test_a_number_in_the_wish_is_respected_and_counted_on(self) -> None:
        names = Namespace()
        assert [names.create_name(wish) for wish in ("relu_5", "relu_5", "relu", "relu")] == [
            "relu_5",
            "relu_6",
            "relu",
            "relu_7",
        ]

    def test_a_lower_number_later_does_not_lead_to_a_name_twice(self) -> None:
        names = Namespace()
        wishes = ["a_5", "a_2", "a", "a", "a", "a", "a_5", "a_2"]
        given = [names.create_name(wish) for wish in wishes]
        assert len(set(given)) == len(wishes)

    @pytest.mark.parametrize("wish", ["a_01", "a_1_1", "a__1", "_", "__", "a_"])
    def test_odd_wishes_are_unique_too(self, wish: str) -> None:
        names = Namespace()
        given = [names.create_name(wish) for _ in range(5)]
        assert len(set(given)) == 5
        assert all(is_legal_name(name) for name in given)

    def test_wishes_that_become_the_same_identifier_do_not_collide(self) -> None:
        names = Namespace()
        assert [names.create_name(wish) for wish in ("a.b", "a_b", "a b")] == ["a_b", "a_b_1", "a_b_2"]


class TestObjects:
    def test_an_object_keeps_the_name_it_got_first(self) -> None:
        names, thing = Namespace(), object()
        assert [names.create_name(wish, thing) for wish in ("thing", "other")] == ["thing", "thing"]

    def test_another_object_gets_another_name(self) -> None:
        names = Namespace()
        assert [names.create_name("thing", object()) for _ in range(2)] == ["thing", "thing_1"]

    def test_a_builtin_may_have_its_own_name(self) -> None:
        assert Namespace().create_name("len", len) == "len"
        assert Namespace().create_name("len", object()) == "len_1"


class TestCopy:
    def test_names_taken_stay_taken(self) -> None:
        names = Namespace()
        names.create_name("relu")
        assert names.copy().create_name("relu") == "relu_1"

    def test_a_copy_is_independent(self) -> None:
        names = Namespace()
        names.copy().create_name("relu")
        assert not names.is_used("relu")
        assert names.create_name("relu") == "relu"

    def test_objects_are_not_carried_over(self) -> None:
        names, thing = Namespace(), object()
        names.create_name("thing", thing)
        assert names.copy().create_name("thing", thing) == "thing_1"
