"""Objects taken apart and put together: parts in slots, nothing shared that could be written, circles kept."""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.ir.arguments import immutable_dict, immutable_list
from torchgraft.ir.structures import parts_of, put_together, take_apart


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def test_an_object_that_holds_itself() -> None:
    original = Holder(keys=torch.ones(2), table={"a": torch.zeros(1)})
    original.itself = original
    template, parts = take_apart(original, is_tensor)
    assert template is not original and template.itself is template and len(parts) == 2
    first, second = put_together(template, 1, 2), put_together(template, 3, 4)
    assert first.itself is first and second.itself is second and first is not second
    assert (first.keys, first.table, second.keys, second.table) == (1, {"a": 2}, 3, {"a": 4})
    assert original.itself is original and is_tensor(original.keys)


def test_two_objects_that_hold_each_other() -> None:
    left, right = Holder(value=torch.ones(1)), Holder()
    left.other, right.other = right, left
    template, parts = take_apart((left, right), is_tensor)
    found = put_together(template, "part")
    assert found[0].other is found[1] and found[1].other is found[0] and found[0].value == "part"
    assert len(parts) == 1 and right.other is left


def test_objects_without_parts_are_kept_and_containers_are_copied() -> None:
    plain, circle, listed = Holder(a=1), Holder(), Holder(items=[1])
    circle.itself = circle
    template, parts = take_apart((plain, circle, listed), is_tensor)
    assert parts == [] and template[0] is plain and template[1] is circle
    assert template[2] is not listed and template[2].items == [1] and template[2].items is not listed.items


def test_parts_of() -> None:
    assert parts_of(Holder(a=1, b=[2])) == {".a": 1, ".b": [2]}
    assert parts_of(torch.nn.Linear) is None and parts_of(3.5) is None


def test_containers_that_refuse_to_change() -> None:
    value = immutable_dict(a=immutable_list([torch.ones(1)]), b=immutable_dict(c=2))
    template, parts = take_apart(value, is_tensor)
    found = put_together(template, "part")
    assert len(parts) == 1 and found == {"a": ["part"], "b": {"c": 2}} and type(found) is immutable_dict
