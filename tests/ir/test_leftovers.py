"""What a program leaves in a model: groups of entries, put where all are as they were."""

from __future__ import annotations

import copy
from typing import Any

from torchgraft.ir.leftovers import MISSING, Entry, Leftovers, leave


def test_a_group_is_put_where_all_is_as_it_was() -> None:
    table: dict[Any, Any] = {"flag": False, "kept": None}
    groups = [[Entry(table, "flag", False, True), Entry(table, "new", MISSING, 1)], [Entry(table, "kept", None, "x")]]
    leave(Leftovers(groups))
    assert table == {"flag": True, "kept": "x", "new": 1}
    table["new"] = 2
    leave(Leftovers(groups))
    assert table == {"flag": True, "kept": "x", "new": 2}


def test_one_and_true_are_not_the_same() -> None:
    table: dict[Any, Any] = {"flag": 1}
    leave(Leftovers([[Entry(table, "flag", True, "put")]]))
    assert table == {"flag": 1}


def test_an_entry_can_be_taken_back() -> None:
    table: dict[Any, Any] = {"old": 1}
    for entry in (Entry(table, "old", 1, 2), Entry(table, "new", MISSING, 3)):
        entry.put()
        assert not entry.is_before()
        entry.take_back()
        assert entry.is_before()
    assert table == {"old": 1}


def test_a_copy_leaves_nothing() -> None:
    table: dict[Any, Any] = {}
    leftovers = Leftovers([[Entry(table, "flag", MISSING, True)]])
    leave(copy.deepcopy(leftovers))
    assert table == {} and repr(leftovers) == "Leftovers(flag)"
