"""`capture`: what comes out for models of many kinds, what it refuses, and that the model is left alone."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import operator
import pickle
import random
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import torchgraft
from torchgraft import GraphModule, GuardError, TraceError, capture
from torchgraft.ir.choices import add_if
from torchgraft.ir.guards import is_guard


def operations(program: GraphModule) -> list[str]:
    """What a program does, guards and reads of inputs left out."""
    return [
        str(getattr(node.target, "__name__", node.target))
        for node in program.graph.nodes
        if node.op.startswith("call_") and not getattr(node.target, "__name__", "").startswith("check_")
    ]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.norm(self.linear(x)).relu())


# ---- levels and leaves ----


def test_module_level_keeps_the_modules_of_torch_as_calls() -> None:
    program = capture(Small(), (torch.randn(3, 4),))
    assert [node.target for node in program.graph.find_nodes(op="call_module")] == ["linear", "norm", "dropout"]


def test_function_level_fetches_parameters() -> None:
    model = Small()
    program = capture(model, (torch.randn(3, 4),), level="function")
    assert not program.graph.find_nodes(op="call_module")
    assert "linear.weight" in [node.target for node in program.graph.find_nodes(op="get_attr")]
    assert dict(program.named_parameters()).keys() <= dict(model.named_parameters()).keys()


def test_mode_switched_after_capture_means_what_it_means_on_the_model() -> None:
    model, x = Small(), torch.randn(6, 4)
    program = capture(model, (x,))
    program.eval()
    model.eval()
    torch.testing.assert_close(program(x), model(x))
    program.train()
    model.train()
    state = torch.get_rng_state()
    expected = model(x)
    torch.set_rng_state(state)
    torch.testing.assert_close(program(x), expected)


@pytest.mark.parametrize("level", ["aten", "core_aten", "joint"])
def test_levels_of_operators(level: str) -> None:
    program = capture(nn.Linear(3, 2), (torch.ones(4, 3),), level=level)
    calls = [node for node in program.graph.nodes if node.op == "call_function" and not is_guard(node.target)]
    targets = [str(node.target) for node in calls if node.target is not operator.eq]  # of sizes, for guards
    assert targets and all(target.startswith("aten.") for target in targets)


@pytest.mark.parametrize(
    "leaf",
    [Small, "inner", [Small], ["inner"], lambda module, path: path == "inner"],
    ids=["a type", "a path", "types", "paths", "a predicate"],
)
def test_leaf_chooses_what_stays_whole(leaf: Any) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Small()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    program = capture(Outer().eval(), (torch.ones(2, 4),), leaf=leaf)
    assert [node.target for node in program.graph.find_nodes(op="call_module")] == ["inner"]


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level must be"):
        capture(Small(), (torch.ones(2, 4),), level="instructions")


def test_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot capture a int"):
        capture(3, (torch.ones(2),))  # type: ignore[arg-type]


def test_inputs_that_do_not_fit_raise_what_the_model_raises() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        capture(Small(), ())


def test_the_error_of_the_model_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        capture(nn.Linear(3, 2), (torch.ones(2, 5),))


# ---- sizes ----


def shapes(x: torch.Tensor) -> torch.Tensor:
    b, t, d = x.shape
    y = x.view(b, t, 2, -1).transpose(1, 2).reshape(b, -1)
    return y + torch.arange(t * d).view(1, -1) + torch.zeros(b, 1) + min(b, 100) * max(t, 2) // 1


@pytest.mark.parametrize("size", [(3, 5, 4), (1, 5, 4), (7, 2, 8), (2, 3, 2)])
def test_sizes_that_flow_stay_free(size: tuple[int, ...]) -> None:
    program = capture(shapes, (torch.randn(3, 5, 4),), dynamic={"x": [0, 1, 2]})
    assert program.guards == []
    x = torch.randn(*size)
    torch.testing.assert_close(program(x), shapes(x))


def test_a_size_that_steers_is_a_guard() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 2 else x

    program = capture(branch, (torch.ones(3, 2),))
    assert [guard.expected for guard in program.guards] == [True]
    assert torch.equal(program(torch.ones(9, 2)), torch.ones(9, 2) * 2)
    with pytest.raises(GuardError, match=r"(?s)x.size\(0\) > 2.*test_program.py.*if x.shape\[0\] > 2") as raised:
        program(torch.ones(1, 2))
    assert "capture the model again" in str(raised.value)


def test_dynamic_refuses_a_size_that_was_fixed() -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[0]):
            x = x + 1
        return x

    with pytest.raises(TraceError, match=r"dimension 0 of 'x' was to stay free.*fixed it to 3.*range"):
        capture(loop, (torch.ones(3, 2),), dynamic={"x": [0]})
    capture(loop, (torch.ones(3, 2),), dynamic={"x": [1]})
    with pytest.raises(ValueError, match="dynamic names 'y'"):
        capture(loop, (torch.ones(3, 2),), dynamic={"y": [0]})


def test_an_item_that_flows_is_computed_by_each_run() -> None:
    program = capture(lambda x, y: x * y.sum().item() + y.max().item() ** 2, (torch.ones(2), torch.ones(3)))
    assert program.guards == []
    torch.testing.assert_close(program(torch.ones(2), torch.full((3,), 2.0)), torch.full((2,), 10.0))


def test_explain_says_what_was_fixed_in_plain_words() -> None:
    def model(x: torch.Tensor, flag: bool) -> torch.Tensor:
        return x * 2 if flag and x.sum() > 0 else x

    text = capture(model, (torch.ones(2), True)).explain()
    assert "the argument 'flag' is True" in text and "x.sum() > 0" in text


# ---- inputs and outputs ----


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Box:
    tensor: torch.Tensor
    scale: float = 2.0


class Bag:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.name = "bag"


@pytest.mark.parametrize(
    ("function", "example", "other"),
    [
        (lambda pair: pair[0] + pair[1], lambda n: ((torch.ones(n), torch.ones(n)),), None),
        (lambda items: items["a"] * items["b"][0], lambda n: ({"a": torch.ones(n), "b": [torch.ones(n)]},), None),
        (lambda pair: Pair(pair.right, pair.left), lambda n: (Pair(torch.ones(n), torch.zeros(n)),), None),
        (lambda box: Box(box.tensor * box.scale, box.scale + 1), lambda n: (Box(torch.ones(n), float(n)),), None),
        (lambda bag: bag.tensor * 2, lambda n: (Bag(torch.ones(n)),), None),
        (lambda x, n: x * n, lambda n: (torch.ones(2), n), None),
        (lambda x: collections.OrderedDict(a=x, n=x.shape[0]), lambda n: (torch.ones(n),), None),
        (lambda *tensors: sum(tensors), lambda n: (torch.ones(n), torch.ones(n)), None),
        (lambda **named: named["b"] - named["a"], lambda n: (), lambda n: {"a": torch.ones(n), "b": torch.ones(n)}),
    ],
    ids=["tuple", "dict", "namedtuple", "dataclass", "object", "number", "OrderedDict", "starred", "keywords"],
)  # fmt: skip
def test_structures_in_and_out(function: Any, example: Any, other: Any) -> None:
    keywords = other or (lambda n: {})
    program = capture(function, example(2), keywords(2))
    for size in (2, 5):
        expected, found = function(*example(size), **keywords(size)), program(*example(size), **keywords(size))
        assert type(found) is type(expected)
        torch.testing.assert_close(_leaves(found), _leaves(expected))


def _leaves(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [value.tensor, torch.tensor(value.scale)]  # type: ignore[union-attr]
    values = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else [value]
    return [torch.as_tensor(item) for item in values]


@pytest.mark.parametrize(
    "wrong",
    [
        ((torch.ones(2), None), {}),
        ((torch.ones(2), [torch.ones(2)]), {}),
        ((torch.ones(2), [torch.ones(2)] * 2, True), {}),
    ],
    ids=["None for a list", "another length", "another flag"],
)
def test_inputs_of_another_kind_raise_guard_errors(wrong: Any) -> None:
    program = capture(lambda x, items, flag=False: x + items[0] + items[1], (torch.ones(2), [torch.ones(2)] * 2))
    with pytest.raises(GuardError, match=r"expected .* for '(items|flag)', got "):
        program(*wrong[0], **wrong[1])


def test_a_tensor_in_the_place_of_none_raises() -> None:
    def masked(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x if mask is None else x * mask

    program = capture(masked, (torch.ones(2),))
    assert torch.equal(program(torch.ones(2)), torch.ones(2))
    with pytest.raises(GuardError, match="expected None for 'mask', got a tensor"):
        program(torch.ones(2), torch.ones(2))
    with pytest.raises(GuardError, match="expected a tensor for 'mask', got None"):
        capture(masked, (torch.ones(2), torch.ones(2)))(torch.ones(2))


def test_one_tensor_given_twice() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y

    one = torch.ones(2)
    program = capture(both, (one, one))
    assert torch.equal(program(one, one), both(one, one))
    with pytest.raises(GuardError, match=r"was captured for \(y is x\) = True, and now it is False"):
        program(one, torch.zeros(2))


def test_inputs_are_not_written() -> None:
    x, items = torch.zeros(3), [torch.zeros(3)]

    def writes(x: torch.Tensor, items: list[torch.Tensor]) -> torch.Tensor:
        x += 1
        items.append(x * 2)
        return items[-1]

    program = capture(writes, (x, items))
    assert torch.equal(x, torch.zeros(3)) and len(items) == 1
    result = program(x, items)
    assert torch.equal(x, torch.ones(3)) and len(items) == 2 and items[1] is result


# ---- effects and state ----


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.cache: dict[int, torch.Tensor] = {}
        self.plain = torch.zeros(3)
        self.weight = nn.Parameter(torch.ones(3))


class InPlace(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.plain.add_(1)
        with torch.no_grad():
            self.weight.mul_(2)
        view = x[:1]
        view.mul_(3)
        return x * self.count + self.plain * self.weight


class NewBuffer(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x * self.count


class Counter(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Cache(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = x.shape[0]
        if key not in self.cache:
            self.cache[key] = torch.full((key, 3), 2.0)
        return x * self.cache[key]


class Numpy(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(numpy.sin(x.detach().numpy()))


class Hooked(Writes):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, inputs, output: output * 2)
        self.linear = nn.Linear(3, 3)
        self.linear.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Recurrent(Writes):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, (hidden, _) = self.layer(x)
        return output, hidden * 2


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 3


class Custom(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda y: (y * self.weight).exp(), Tripled.apply(x), use_reentrant=False
        )


class Mapped(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row * self.weight.sum())(x)


class Chance(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(3) * random.random() + functional.dropout(x, 0.5, self.training)


class Parametrised(Writes):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Differentiated(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((y**3).sum(), y)
        return gradient * self.weight


MODELS = [
    InPlace, NewBuffer, Counter, Cache, Numpy, Hooked, Recurrent, Custom, Mapped, Chance, Parametrised, Differentiated,
]  # fmt: skip


def _made(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return cls()


def _snapshot(model: nn.Module) -> dict[str, Any]:
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    others = {
        (path, name): (id(value), copy.copy(value) if isinstance(value, (dict, list, int)) else None)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    }
    return {**tensors, **{str(key): value for key, value in others.items()}}


@pytest.mark.parametrize("level", ["module", "function"])
@pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
def test_effects(cls: type[nn.Module], level: str) -> None:
    """Results, gradients, state and random numbers of three runs, on other sizes too, before and after dead-code removal."""
    torch.manual_seed(0)
    inputs = [torch.randn(size, 3) for size in (2, 2, 4)]
    expected_model = _made(cls)
    expected = _runs(expected_model, inputs, expected_model)
    for edit in (None, "eliminate_dead_code"):
        model = _made(cls)
        before, states = _snapshot(model), random.getstate()
        program = capture(model, (torch.randn(2, 3),), level=level)
        after = _snapshot(model)
        assert before.keys() == after.keys()
        assert all(_same(before[key], after[key]) for key in before), "capturing changed the model"
        assert random.getstate() == states
        if edit:
            program.graph.eliminate_dead_code()
        found = _runs(program, inputs, model)
        torch.testing.assert_close(found, expected)


def _same(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def _runs(function: Any, inputs: list[torch.Tensor], model: nn.Module) -> list[Any]:
    results: list[Any] = []
    torch.manual_seed(7)
    random.seed(7)
    for x in inputs:
        leaf = x.clone().requires_grad_()
        try:
            output = function(leaf + 0)
        except GuardError:
            results.append("refused")
            continue
        tensors = list(output) if isinstance(output, tuple) else [output]
        sum((tensor * torch.arange(tensor.numel()).view(tensor.shape)).sum() for tensor in tensors).backward()
        results.append([tensor.detach().clone() for tensor in tensors])
        results.append(leaf.grad)
    results.append([value.detach().clone() for value in model.state_dict().values()])
    results.append(torch.rand(1))
    return results


def test_what_is_kept_whole_is_said() -> None:
    program = capture(nn.Sequential(nn.Linear(3, 3), Counter()), (torch.ones(2, 3),))
    assert list(program.meta["kept_whole"]) == ["1"] and "self.calls" in program.meta["kept_whole"]["1"]
    assert [node.target for node in program.graph.find_nodes(op="call_module")] == ["0", "1"]
    assert list(capture(Counter(), (torch.ones(2, 3),)).meta["kept_whole"]) == [""]


def test_random_states_are_put_back() -> None:
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]

    def draws(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(2) * random.random() * numpy.random.rand()

    capture(draws, (torch.ones(2),))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.random.get_state()[1].tolist() == states[2]  # type: ignore[index]


def test_lazy_models_are_refused_with_the_remedy() -> None:
    with pytest.raises(TraceError, match="lazy parameters.*run it once"):
        capture(nn.LazyLinear(3), (torch.ones(2, 3),))


def test_programs_are_copied_and_pickled() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    program = capture(model, (torch.ones(2, 3),))
    for other in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        torch.testing.assert_close(other(torch.ones(4, 3)), model(torch.ones(4, 3)))
        with pytest.raises(GuardError):
            other(None)


def test_functions_take_the_modules_they_use_along() -> None:
    layer = nn.BatchNorm1d(3)
    before = copy.deepcopy(layer.state_dict())
    program = capture(lambda x: layer(x) + 1, (torch.randn(4, 3),))
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert [module for module in program.modules() if module is layer]
    x = torch.randn(5, 3)
    torch.testing.assert_close(program(x), copy.deepcopy(layer)(x) + 1)


def test_methods_and_partials() -> None:
    model = Small().eval()
    torch.testing.assert_close(capture(model.forward, (torch.ones(2, 4),))(torch.ones(3, 4)), model(torch.ones(3, 4)))
    program = capture(functools.partial(torch.add, alpha=2), (torch.ones(2), torch.ones(2)))
    torch.testing.assert_close(program(torch.ones(3), torch.ones(3)), torch.full((3,), 3.0))


def test_without_data_nothing_is_computed() -> None:
    with torch.device("meta"):
        model = Small().eval()
        program = capture(model, (torch.empty(3, 4),))
    assert {parameter.device.type for parameter in program.parameters()} == {"meta"}
    loaded = torchgraft.GraphModule(Small().eval(), program.graph)
    assert loaded(torch.ones(2, 4)).shape == (2, 4)


def test_fake_tensors_are_enough() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = Small().eval()
        program = capture(model, (torch.empty(3, 4),))
    assert operations(program) == ["linear", "norm", "relu", "dropout"]


def test_a_fake_that_a_call_hands_through_is_watched_like_any_tensor() -> None:
    """Masks of transformers are made so; the model was kept as one call, and nothing inside it could be counted."""
    from torch._subclasses import FakeTensorMode

    def forward(x: torch.Tensor) -> torch.Tensor:
        mask = x.new_ones((), dtype=torch.bool)
        return x * (mask & (torch.arange(4, device=x.device) >= 0).to(mask.device))

    with FakeTensorMode():
        program = capture(forward, (torch.empty(3, 4),))
    assert program.meta.get("kept_whole", {}) == {} and operations(program)[-1] == "mul"


def test_explain_says_what_is_kept_whole_and_why() -> None:
    assert (
        "The model is kept as one call that runs its Python: it writes self.calls"
        in capture(Counter(), (torch.ones(2, 3),)).explain()
    )


def test_a_program_verifies_itself_against_its_model() -> None:
    model = Small().eval()
    program = capture(model, (torch.ones(2, 4),))
    assert program.verify(model, (torch.ones(2, 4),)).ok
    program.linear = nn.Linear(4, 4)
    assert not program.verify(model, (torch.ones(2, 4),)).ok


@pytest.mark.zoo
def test_operations_of_resnet50_are_those_the_paper_counts() -> None:
    """445 in the paper; docs/capture.md says what the rest of the nodes is."""
    model = torchgraft.zoo.create("resnet50").eval()
    program = capture(model, (torch.randn(1, 3, 64, 64),), level="function")
    guarded = {input for guard in program.guards for input in guard.node.all_input_nodes}
    checks = [node for node in program.graph.nodes if getattr(node.target, "__name__", "").startswith("check_")]
    modes = [node for node in program.graph.find_nodes(op="get_attr") if node.target.endswith(".training")]
    counters = [
        node for add in program.graph.find_nodes(op="call_function", target=add_if) for node in (add, add.args[1])
    ]
    assert (len(modes), len(counters)) == (53, 106)
    rest = len(program.graph.nodes) - len(checks) - len(guarded) - len(modes) - len(counters)
    assert rest == 444 and len(program.graph.nodes) == 710
    counts = collections.Counter(operations(program))
    wanted = {"conv2d": 53, "batch_norm": 53, "relu": 49, "add_": 16, "max_pool2d": 1, "flatten": 1, "linear": 1}
    assert {name: counts[name] for name in wanted} == wanted


def _telling(forward: Any) -> Any:
    """A decorator that tells what is given by name from what is not, as some of transformers do."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("twice", False)
        kwargs["twice"] = True
        return forward(self, *args, **kwargs) + (len(args) if wanted else 10 * len(args))

    return wrapper


class Telling(nn.Module):
    @_telling
    def forward(self, x: torch.Tensor, twice: bool = False, scale: float = 1.0) -> torch.Tensor:
        return x * scale * (2 if twice else 1)


@pytest.mark.parametrize("options", [{}, {"twice": True}, {"scale": 3.0, "twice": True}])
def test_what_is_given_by_name_stays_by_name(options: dict[str, Any]) -> None:
    model, x = Telling(), torch.ones(2)
    program = capture(model, (x,), options)
    assert program.meta["kept_whole"] == {} and torch.equal(program(x, **options), model(x, **options))
    program = capture(model, (), {"x": x, **options})
    assert program.meta["kept_whole"] == {} and torch.equal(program(x=x, **options), model(x=x, **options))
