"""`verify` finds what a program does differently, in every aspect and situation, and leaves everything as it was."""

import dataclasses
import json
from collections import namedtuple

import pytest
import torch
from torch import nn

from tests.recording.models import Net
from torchgraft import GraftError, symbolic_trace, zoo
from torchgraft.capturing.program import capture
from torchgraft.recording.verify import REFUSED, RIGHT, SKIPPED, WRONG, verify

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    values: torch.Tensor
    number: int


class Structures(nn.Module):
    def forward(self, x):
        return {"pair": Pair(x + 1, [x * 2, 3]), "result": Result(x.sum(), 5), "none": None}


class InPlace(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x * 2


class Keywords(nn.Module):
    def forward(self, x, *rest, mask=None, scale=2.0):
        x = x if mask is None else x * mask
        return sum([x * scale, *rest])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 5, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x):
        output, (hidden, state) = self.cell(x)
        return output, hidden + state


class Masked(nn.Module):
    """Embeds tokens; out of range tokens would raise."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, tokens, mask):
        return self.table(tokens).masked_fill(mask[..., None], float("-inf")).softmax(-1)


class Branch(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x - 1


MODELS = [
    (Net, (torch.randn(3, 4),), {}),
    (Structures, (torch.randn(3, 4),), {}),
    (InPlace, (torch.randn(3, 4),), {}),
    (Keywords, (torch.randn(3, 4), torch.randn(3, 4)), {"mask": torch.ones(3, 4)}),
    (Recurrent, (torch.randn(2, 3, 4),), {}),
    (Masked, (torch.randint(0, 7, (2, 5)), torch.zeros(2, 5, dtype=torch.bool)), {}),
]


def statuses(verification):
    return {check.situation: check.status for check in verification.checks}


def with_edit(edit):
    """A program of Net with an edit, and the model."""
    model = Net()
    program = symbolic_trace(model)
    edit({node.name: node for node in program.graph.nodes}, program)
    return model, program


# ---- right programs ----


@pytest.mark.parametrize(
    ("model_class", "args", "kwargs", "way"),
    # Symbolically, how many values *rest has is not known.
    [(*model, way) for model in MODELS for way in ("watched", "symbolic") if (model[0], way) != (Keywords, "symbolic")],
)
def test_right_programs(model_class, args, kwargs, way):
    model = model_class()
    program = capture(model, args, kwargs) if way == "watched" else symbolic_trace(model)
    verification = verify(model, program, args, kwargs)
    assert verification.ok, verification
    assert statuses(verification)["fresh values"] == RIGHT
    assert statuses(verification)[f"batch {args[0].shape[0]} -> {args[0].shape[0] + 1}"] == RIGHT


@pytest.mark.zoo
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["mlp", "resnet18", "transformer"])
def test_zoo(name, training):
    sizes = {"resnet18": {"size": 32}, "transformer": {"length": 6}}.get(name, {})
    options = {"transformer": {"layers": 2}}.get(name, {})
    model = zoo.create(name, **options).train(training)
    inputs = zoo.example_inputs(name, batch=2, **sizes)
    for program in (capture(model, inputs), symbolic_trace(model)):
        verification = verify(model, program, inputs)
        assert verification.ok, verification
        assert verification.checks[0].aspects["outputs"].verdict == "equal"
        assert verification.checks[0].aspects["gradients"].verdict == "equal"
        if name == "resnet18":
            assert (verification.checks[0].aspects["state"].compared > 0) is training


def test_functions_and_bound_methods():
    scale = torch.tensor(2.0)
    assert verify(lambda x: x * scale, symbolic_trace(lambda x: x * scale), torch.ones(3)).ok
    model = Net()
    assert verify(model.forward, symbolic_trace(model.forward), (torch.ones(2, 4),)).ok


def test_tensors_without_data_are_compared_by_shape():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).to("meta")
    program = symbolic_trace(model)
    inputs = (torch.empty(2, 4, device="meta"),)
    assert verify(model, program, inputs).ok
    program.graph.find_nodes(op="call_module", target="1")[0].replace_all_uses_with(
        program.graph.find_nodes(op="placeholder")[0]
    )
    assert "shape is (2, 3) in the model and (2, 4) in the program" in str(verify(model, program, inputs))


# ---- wrong programs, by aspect ----


def test_wrong_output():
    def edit(nodes, program):
        nodes["tanh"].target = "sigmoid"

    model, program = with_edit(edit)
    verification = verify(model, program, (torch.ones(3, 4),))
    assert not verification.ok
    assert verification.wrong[0].situation == "example"
    assert "the result differs, output: 12 of 12 values differ, by up to " in verification.wrong[0].reason
    assert verification.first_difference.node == "tanh"


def test_wrong_structure():
    model = Structures()
    program = symbolic_trace(lambda x: {"pair": (x + 1, [x * 2, 3]), "result": Result(x.sum(), 6)})
    check = verify(model, program, (torch.ones(3),)).wrong[0]
    texts = [str(difference) for difference in check.aspects["outputs"].differences]
    assert texts[0] == "output: dict with 3 entries in the model, dict with 2 entries in the program"
    assert "output['pair']: Pair with 2 entries in the model, tuple with 2 entries in the program" in texts
    assert "output['result'].number: int 5 in the model, int 6 in the program" in texts


def test_missing_state_change():
    def edit(nodes, program):
        program.graph.erase_node(nodes["add_"])

    model, program = with_edit(edit)
    verification = verify(model, program, (torch.ones(3, 4),), other_values=False, other_sizes=False)
    assert verification.wrong[0].reason == (
        "the state afterwards differs, calls: the model changes it, the program does not"
    )
    assert verification.first_difference.node is None
    assert "the program lacks the call 'add_' (call_method add_) at " in str(verification.first_difference)
    assert '"self.calls.add_(1)"' in str(verification.first_difference)


def test_missing_input_mutation():
    model = InPlace()
    program = symbolic_trace(lambda x: (x + 1) * 2)
    verification = verify(model, program, (torch.ones(2),), other_sizes=False)
    assert statuses(verification)["example"] == WRONG
    assert "the content of the inputs afterwards differs, x: 2 of 2 values differ" in verification.wrong[0].reason


def test_other_random_numbers():
    def edit(nodes, program):
        node = nodes["dropout"]
        with program.graph.inserting_before(node):
            program.graph.call_function(torch.rand, (1,))

    model, program = with_edit(edit)
    reason = verify(model, program, (torch.ones(3, 4),), other_values=False, other_sizes=False).wrong[0].reason
    assert "the use of random numbers differs, torch: other numbers were drawn than in the model" in reason


class RoundWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        return self.second(RoundWithGradient.apply(self.first(x)))


def test_wrong_gradients():
    model = Rounding()
    program = symbolic_trace(model)
    node = next(node for node in program.graph.nodes if node.op == "call_function")
    node.target = torch.round
    verification = verify(model, program, (torch.randn(3, 4),))
    assert verification.checks[0].aspects["outputs"].verdict == "equal"
    assert "the backward differs, gradient of first.weight: " in verification.wrong[0].reason
    assert verification.first_difference is None  # all values are the same
    assert verify(model, program, (torch.randn(3, 4),), gradients=False).ok


class Attention(nn.Module):
    """A bias of the keys changes nothing, so that its gradient is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.key, self.query = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), x)


def test_gradients_that_are_rounding_alone():
    model, x = Attention(), torch.randn(2, 4, 5, 16)
    program = capture(model, x, level="core_aten")
    assert verify(model, program, x, other_values=False, other_sizes=False).ok
    program.key = nn.Linear(16, 16)
    program.key.load_state_dict({"weight": model.key.weight * (1 + 1e-3), "bias": model.key.bias})
    assert not verify(model, program, x, other_values=False, other_sizes=False).ok


def test_wrong_requires_grad():
    model = Rounding()
    program = symbolic_trace(model)
    node = next(node for node in program.graph.nodes if node.name == "second")
    with program.graph.inserting_after(node):
        detached = program.graph.call_method("detach", (node,))
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    verification = verify(model, program, (torch.randn(3, 4),), other_values=False, other_sizes=False)
    assert "output: requires_grad is True in the model and False in the program" in verification.wrong[0].reason
    assert verification.first_difference.node == "detach"


def test_python_attribute_that_only_the_model_changes():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + 1

    model = Counter()
    verification = verify(model, symbolic_trace(lambda x: x + 1), (torch.ones(2),))
    assert "calls: the model changes it, the program does not" in verification.wrong[0].reason
    assert model.calls == 0


def test_program_that_raises():
    def edit(nodes, program):
        nodes["tanh"].args = (nodes["tanh"].args[0], 3)

    model, program = with_edit(edit)
    verification = verify(model, program, (torch.ones(3, 4),), other_values=False, other_sizes=False)
    assert "the program raises TypeError: " in verification.wrong[0].reason
    assert verification.first_difference.node == "tanh"
    assert "raises TypeError" in verification.first_difference.text


def test_gradients_that_only_the_model_has():
    model = nn.Sequential(nn.Linear(4, 4))
    program = symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    program.load_state_dict(model.state_dict())
    assert verify(model, program, (torch.ones(2, 4),)).ok  # parameters of its own, under the same names
    program.get_parameter("0.bias").requires_grad_(False)
    reason = verify(model, program, (torch.ones(2, 4),)).wrong[0].reason
    assert "gradient of 0.bias: a tensor of shape (4,) in the model, NoneType None in the program" in reason


# ---- situations ----


def test_baked_branch_is_wrong_on_other_values_only():
    model = Branch()
    verification = verify(model, symbolic_trace(lambda x: x * 2), (torch.rand(4, 4),))
    assert statuses(verification)["example"] == RIGHT
    assert statuses(verification)["other values"] == WRONG
    assert not verification.ok


def test_guard_error_is_refused_not_wrong():
    model = Branch()
    inputs = (torch.rand(4, 4),)
    verification = verify(model, capture(model, inputs), inputs)
    assert statuses(verification)["other values"] == REFUSED
    assert verification.ok


def test_refusing_the_example_is_not_ok():
    model = nn.Sequential(nn.Linear(4, 4))

    class Mode(nn.Module):
        def forward(self, x):
            return x + 1 if self.training else x

    model = Mode()
    program = symbolic_trace(model)
    program.eval()
    model.eval()
    verification = verify(model, program, (torch.ones(2),))
    assert not verification.ok and not verification.wrong
    assert str(verification).startswith("Mode: the program REFUSES the example inputs (")


def test_baked_size_is_wrong_on_other_sizes_only():
    program = symbolic_trace(lambda x: x.view(2, 12).sum(1))
    verification = verify(lambda x: x.view(x.shape[0], 12).sum(1), program, (torch.rand(2, 3, 4),))
    assert statuses(verification) == {
        "example": RIGHT,
        "fresh values": RIGHT,
        "other values": RIGHT,
        "inputs with grad": RIGHT,
        "batch 2 -> 3": WRONG,
        "batch 2 -> 1": WRONG,
        "size 3 -> 4": SKIPPED,
        "size 4 -> 2": SKIPPED,
    }
    assert "the model itself raises RuntimeError: " in verification.checks[-1].reason
    assert verify(lambda x: x.view(2, 12), program, (torch.rand(2, 3, 4),), other_sizes=False).wrong


def test_model_that_fails_on_the_example():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(GraftError, match="the model itself raises RuntimeError: .*\ngive inputs it accepts"):
        verify(model, symbolic_trace(model), (torch.ones(2, 5),))


def test_unsteady_model_is_skipped():
    state = {"calls": 0}

    def model(x):
        state["calls"] += 1
        return x + state["calls"]

    verification = verify(model, symbolic_trace(lambda x: x + 1), (torch.ones(2),))
    assert statuses(verification)["example"] in (RIGHT, SKIPPED)
    assert statuses(verification)["fresh values"] == SKIPPED


# ---- tolerance ----


def test_tolerance():
    def close(x):
        return x * (1 + 1e-6)

    inputs = (torch.linspace(1, 2, 8),)
    program = symbolic_trace(close)
    verification = verify(lambda x: x * 1, program, inputs)
    assert verification.ok
    assert verification.checks[0].aspects["outputs"].verdict.startswith("within ")
    assert not verify(lambda x: x * 1, program, inputs, rtol=1e-8).ok
    assert not verify(lambda x: x * 1, program, inputs, atol=1e-8).ok
    assert verify(lambda x: x * 1, program, inputs, atol=1e-5).ok
    assert not verify(lambda x: x.double(), symbolic_trace(lambda x: x.double() * (1 + 1e-6)), inputs).ok


def test_not_a_number_equals_itself():
    inputs = (torch.tensor([1.0, float("nan"), float("inf")]),)
    assert verify(lambda x: x - 1, symbolic_trace(lambda x: x - 1), inputs, other_values=False).ok
    assert not verify(lambda x: x - 1, symbolic_trace(lambda x: x.nan_to_num() - 1), inputs, other_values=False).ok


# ---- texts ----


def test_table():
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    text = str(verify(model, symbolic_trace(model), (torch.ones(2, 4),)))
    *lines, last = text.splitlines()
    assert lines == [
        "Sequential: the program does what the model does (6 right, 1 skipped)",
        "situation         outputs  inputs  gradients  state  random",
        "example           equal    equal   equal      -      equal",
        "fresh values      equal    equal   equal      -      equal",
        "other values      equal    equal   -          -      equal",
        "inputs with grad  equal    equal   equal      -      equal",
        "batch 2 -> 3      equal    equal   equal      -      equal",
        "batch 2 -> 1      equal    equal   -          -      equal",
    ]
    reason = last.removeprefix("size 4 -> 2       skipped: the model itself raises RuntimeError: ")
    assert reason.removeprefix("addmm: ").startswith("mat1 and mat2 shapes cannot be multiplied (2x2 and 4")


def test_raise_if_wrong():
    def edit(nodes, program):
        nodes["tanh"].target = "sigmoid"

    model, program = with_edit(edit)
    verify(model, symbolic_trace(model), (torch.ones(2, 4),)).raise_if_wrong()
    with pytest.raises(GraftError, match="first difference: node 'tanh' at .*: call_method sigmoid"):
        verify(model, program, (torch.ones(2, 4),)).raise_if_wrong()


def test_to_dict_is_plain():
    model = Net()
    data = verify(model, symbolic_trace(model), (torch.ones(2, 4),)).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["ok"] and data["checks"][0]["aspects"]["state"] == "equal"


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


def test_a_model_that_is_one_call_changes_its_attributes_like_itself() -> None:
    model, x = Counting(), torch.ones(2, 4)
    found = verify(model, capture(model, (x,)), (x,))
    assert found.ok and found, str(found)
    assert not verify(model, symbolic_trace(nn.Linear(4, 4)), (x,))
    assert model.calls == 0


def test_inputs_in_the_place_of_the_program():
    with pytest.raises(TypeError, match="expected a program to compare with the model, got a Tensor\n  verify"):
        verify(nn.Linear(2, 2), torch.ones(1, 2))
