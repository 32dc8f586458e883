"""What exported programs demand of their inputs: the conditions found, and the errors when they do not hold."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from torchgraft import GuardError, from_export, symbolic_trace, to_fx
from torchgraft.bridge.input_guards import InputGuards


def exported(forward, *args, shapes=None, strict=False, **kwargs):
    model = type("Model", (nn.Module,), {"forward": forward})()
    return export(model, args, kwargs or None, dynamic_shapes=shapes, strict=strict)


def conditions(*args, **options):
    return from_export(exported(*args, **options)).get_submodule("_guards_fn").conditions


def add(self, x, y):
    return x + y


def keep(self, x, y):
    return x * 2, y * 2


def halves(self, x):
    if x.shape[0] % 2 == 0:
        return x.view(-1, 2, 4)
    return x


def shorter(self, x, y):
    return x[: y.shape[0]] + y


SMALL = Dim("small", min=3, max=50)


def test_fixed_sizes():
    assert conditions(lambda self, x: x + 1, torch.ones(2, 3)) == [
        "x.dim() == 2",
        "x.size()[0] == 2",
        "x.size()[1] == 3",
    ]


def test_constants():
    def forward(self, n, text, nothing, number, flag, unknown):
        return torch.ones(2) * n

    assert conditions(forward, 7, "a'b", None, 1.5, True, float("nan")) == [
        "n == 7",
        'text == "a\'b"',
        "nothing == None",
        "number == 1.5",
        "flag == True",
        "unknown != unknown",
    ]


def test_ranges_and_equal_sizes():
    found = conditions(add, torch.ones(8), torch.ones(8), shapes={"x": {0: SMALL}, "y": {0: SMALL}})
    assert found[:5] == [
        "x.dim() == 1",
        "x.size()[0] >= 3",
        "x.size()[0] <= 50",
        "y.dim() == 1",
        "y.size()[0] == x.size()[0]",
    ]


def test_a_free_size_has_no_condition():
    assert conditions(lambda self, x: x + 1, torch.ones(4), shapes={"x": {0: Dim("n")}}) == ["x.dim() == 1"]


def test_sizes_made_of_another_size():
    found = conditions(keep, torch.ones(8), torch.ones(4), shapes={"x": {0: 2 * SMALL}, "y": {0: SMALL}})
    assert "x.size()[0] == 2 * y.size()[0]" in found


def test_sizes_made_of_a_size_that_no_input_has():
    program = exported(keep, torch.ones(8), torch.ones(13), shapes={"x": {0: 2 * SMALL}, "y": {0: 3 * SMALL + 1}})
    module = from_export(program)
    module(torch.ones(10), torch.ones(16))
    with pytest.raises(GuardError, match=r"x.size\(\)\[0\] % 2 == 0 does not hold"):
        module(torch.ones(9), torch.ones(16))
    with pytest.raises(GuardError, match=r"y.size\(\)\[0\] == 1 \+ 3 \* \(x.size\(\)\[0\] // 2\) does not hold"):
        module(torch.ones(10), torch.ones(13))


@pytest.mark.parametrize("strict", [False, True])
def test_conditions_that_the_model_asked(strict):
    program = exported(halves, torch.ones(6, 4), shapes={"x": {0: Dim.AUTO}}, strict=strict)
    for form in (program, program.run_decompositions()):
        module = from_export(form)
        assert "x.size()[0] % 2 == 0" in module.get_submodule("_guards_fn").conditions
        assert module(torch.ones(8, 4)).shape == (4, 2, 4)
        with pytest.raises(GuardError, match="% 2 == 0"):
            module(torch.ones(7, 4))


@pytest.mark.parametrize("strict", [False, True])
def test_conditions_between_inputs(strict):
    found = conditions(
        shorter, torch.ones(6), torch.ones(5), shapes={"x": {0: Dim.AUTO}, "y": {0: Dim.AUTO}}, strict=strict
    )
    assert "y.size()[0] <= x.size()[0]" in found


@pytest.mark.parametrize("strict", [False, True])
def test_conditions_on_leaves_of_trees(strict):
    def forward(self, *values, options):
        return values[0] + values[1], options["a"][0][: options["b"].shape[0]]

    found = conditions(
        forward,
        torch.ones(5),
        torch.ones(5),
        options={"a": [torch.ones(7)], "b": torch.ones(6)},
        shapes={"values": ({0: Dim.AUTO}, {0: Dim.AUTO}), "options": {"a": [{0: Dim.AUTO}], "b": {0: Dim.AUTO}}},
        strict=strict,
    )
    assert "values_1.size()[0] == values_0.size()[0]" in found
    assert "options_b.size()[0] <= options_a_0.size()[0]" in found


def test_integers():
    module = from_export(exported(lambda self, x, n: x + n, torch.ones(2), 5, shapes={"x": None, "n": Dim.DYNAMIC}))
    assert torch.equal(module(torch.ones(2), 8), torch.full((2,), 9.0))


def test_without_example_inputs():
    program = exported(lambda self, x: x + 1, torch.ones(2))
    program.example_inputs = None
    with pytest.raises(GuardError, match="does not hold"):
        from_export(program)(torch.ones(3))


def test_a_tensor_that_was_given_twice():
    """torch.export's own module answers wrongly here."""
    twice = torch.ones(2)
    program = exported(add, twice, twice)
    module = from_export(program)
    assert torch.equal(module(twice, twice), twice * 2)
    with pytest.raises(GuardError, match=r"y is x does not hold, y is a tensor of shape \(2,\)"):
        module(torch.ones(2), torch.zeros(2))


def test_the_error():
    module = from_export(exported(lambda self, x: x + 1, torch.ones(2)))
    with pytest.raises(GuardError) as caught:
        module(torch.ones(3))
    assert str(caught.value) == (
        "the exported program does not take these inputs: x.size()[0] == 2 does not hold, x.size()[0] is 3; "
        "give inputs like those it was exported with, or export it again with dynamic_shapes that allow these"
    )


def test_another_number_of_dimensions_is_refused():
    module = from_export(exported(lambda self, x: x + 1, torch.ones(2, 3)))
    with pytest.raises(GuardError, match=r"x.dim\(\) == 2 does not hold, x.dim\(\) is 3"):
        module(torch.ones(2, 3, 4))


def test_unchecked_on_request():
    module = from_export(exported(lambda self, x: x + 1, torch.ones(2)), check_inputs=False)
    assert module(torch.ones(3)).shape == (3,)
    assert not module.graph.find_nodes(op="call_module")
    assert not module.eval().training


def test_the_mode_is_fixed():
    module = from_export(export(nn.Sequential(nn.Dropout()), (torch.ones(2),)))
    for switch in (module.eval, module.train):
        with pytest.raises(NotImplementedError, match="export the model again in the other mode"):
            switch()


def test_dead_code_elimination_keeps_the_guards():
    module = from_export(exported(lambda self, x: torch.ones(1), torch.ones(2)))
    module.graph.eliminate_dead_code()
    theirs = to_fx(module)
    theirs.graph.eliminate_dead_code()
    theirs.recompile()
    for each in (module, theirs):
        with pytest.raises(GuardError):
            each(torch.ones(3))


def test_guards_can_be_copied_saved_and_read():
    guards = InputGuards(["x", "n"], ["x.dim() == 2", "n == 3"])
    for again in (guards, copy.deepcopy(guards), pickle.loads(pickle.dumps(guards))):
        assert again(torch.ones(1, 1), 3) is None
        with pytest.raises(GuardError, match="n == 3 does not hold, n is 4"):
            again(torch.ones(1, 1), 4)
        assert repr(again) == "InputGuards(\n  x.dim() == 2\n  n == 3\n)"


def test_a_guard_that_cannot_be_read_is_warned_of():
    program = exported(lambda self, x: x + 1, torch.ones(2))
    program._guards_code = ["L['elsewhere'].size()[0] == 3"]
    with pytest.warns(
        UserWarning, match="leaves out a guard of the exported program that speaks of no input"
    ) as caught:
        from_export(program)
    assert caught[0].filename == __file__


def test_a_condition_of_traced_values_becomes_part_of_the_program():
    guards = InputGuards(["x"], ["x.size()[0] == 3"])

    def function(x):
        guards._check(x)
        return x * 2

    program = symbolic_trace(function)
    assert program(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(AssertionError, match="does not hold"):
        program(torch.ones(4))
