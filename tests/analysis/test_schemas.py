"""What is read off the schemas of operators, in one table for each overload."""

import torch

from torchgraft.analysis.schemas import overloads_of, schema_parameters

aten = torch.ops.aten


def test_parameters_of_an_overload():
    x, low, high = schema_parameters(aten.clamp.default)
    assert (x.name, x.type, x.kind, x.is_optional, x.has_default) == ("self", "Tensor", "Tensor", False, False)
    assert (low.type, low.kind, low.is_optional, low.default) == ("Optional[number]", "number", True, None)
    assert not high.keyword_only and schema_parameters(aten.add.Tensor)[-1].keyword_only
    assert [item.repeats for item in schema_parameters(aten.max_pool2d.default)[:3]] == [None, 2, 2]


def test_marks_of_memory():
    assert [item.written for item in schema_parameters(aten.add_.Tensor)] == [True, False, False]
    view = schema_parameters(aten.view.default)[0]
    assert view.shared and not view.written
    assert [item.name for item in schema_parameters(aten.add.out) if item.written] == ["out"]


def test_overloads_that_tensors_reach():
    names = [overload._overloadname for overload in overloads_of(aten.add)]
    assert {"Tensor", "Scalar", "out"} <= set(names) and "str" not in names
    assert aten.relu.default in overloads_of(aten.relu) and "str" in aten.add.overloads()
