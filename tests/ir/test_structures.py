"""Objects taken apart and put together: parts in slots, nothing shared that could be written, circles kept."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch

import torchgraft
from torchgraft.ir.arguments import immutable_dict, immutable_list
from torchgraft.ir.structures import Template, parts_of, put_together, remade, take_apart


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


@dataclasses.dataclass
class Fields(OrderedDict[str, Any]):
    """Copied from its fields, whatever order its items are in; filled by way of its attributes."""

    first: Any = None
    second: Any = None

    def __setitem__(self, key: str, value: Any) -> None:
        OrderedDict.__setitem__(self, key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self) -> Any:
        return type(self), (self.first, self.second)


class Pair(NamedTuple):
    left: Any
    right: Any


class Labelled(list[Any]):
    def __init__(self, label: str, items: Any) -> None:
        super().__init__(items)
        self.label = label


@pytest.mark.parametrize(
    "copied", [lambda template: template, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_containers_with_attributes_and_an_order_of_their_own(copied: Any) -> None:
    fields, items = Fields(), Labelled("two", [torch.ones(1), 3])
    fields["second"], fields["first"] = torch.ones(2), torch.ones(3)
    fields.extra = items  # type: ignore[attr-defined]
    template, parts = take_apart(fields, is_tensor)
    assert [part.numel() for part in parts] == [2, 3, 1], "each once"
    found = put_together(copied(template), "b", "a", "c")
    assert type(found) is Fields and list(found.items()) == [("second", "b"), ("first", "a")]
    assert (found.first, found.second) == ("a", "b")
    assert type(found.extra) is Labelled and found.extra == ["c", 3] and found.extra.label == "two"
    assert fields.extra is items and is_tensor(items[0])


def test_an_object_inside_a_container_of_its_own_kind() -> None:
    template, parts = take_apart(Labelled("one", [Holder(cache=Holder(keys=torch.ones(2)))]), is_tensor)
    assert len(parts) == 1 and put_together(template, "keys")[0].cache.keys == "keys"
    template, _ = take_apart(Pair(Holder(keys=torch.ones(2)), 1), is_tensor)
    assert put_together(template, "keys").left.keys == "keys"


def test_other_items_in_a_container_of_the_same_class() -> None:
    groups = defaultdict(list, a=[1])
    assert remade(groups, {"b": [2]})["new"] == [] and groups == {"a": [1]}
    recent = remade(deque([1, 2], maxlen=2), [5, 6, 7])
    assert recent == deque([6, 7], maxlen=2) and recent.maxlen == 2
    assert remade(torch.Size([1]), [2, 3]) == torch.Size([2, 3])


def test_compilers_see_inside_results_by_name() -> None:
    def model(x: torch.Tensor) -> Any:
        return OrderedDict(out=x + 1, others=[{"twice": x * 2}, (x * 3, 4)])

    program = torchgraft.capture(model, torch.ones(2), level="function")
    found = torch.compile(program, fullgraph=True, backend="eager")(torch.ones(2))
    assert type(found) is OrderedDict and list(found) == ["out", "others"]
    assert found["others"][0]["twice"].tolist() == [2.0, 2.0] and found["others"][1][1] == 4


def test_what_is_met_twice_and_containers_with_attributes_are_no_trees() -> None:
    shared = [torch.ones(1)]
    template, _ = take_apart({"one": shared, "other": shared}, is_tensor)
    found = put_together(Template(template), "x")
    assert found["one"] is found["other"] and found["one"] == ["x"] and not Template(template).is_tree
    named: Any = OrderedDict(a=torch.ones(1))
    named.label = "kept"
    template, _ = take_apart(named, is_tensor)
    assert put_together(Template(template), "x").label == "kept"
    template, _ = take_apart(OrderedDict(a=[torch.ones(1)]), is_tensor)
    for kept in (Template(template), copy.deepcopy(Template(template)), pickle.loads(pickle.dumps(Template(template)))):
        assert kept.is_tree and put_together(kept, "x") == OrderedDict(a=["x"])
        assert put_together(kept, "x")["a"] is not put_together(kept, "x")["a"]
