"""Pipelines: their text form, the order and the report, verification, the check, observers, history, and user's own passes."""

import copy
import importlib.metadata
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchgraft
from torchgraft.errors import GraftError, PassError
from torchgraft.passes import Pass, Pipeline, find, names, register
from torchgraft.passes import registry as passes_registry
from torchgraft.passes.definition import option_text


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()


IMAGE = torch.randn(2, 3, 8, 8)


@dataclass(frozen=True)
class ScaleByTwo(Pass):
    """Wrong on purpose: doubles what the first relu returns."""

    factor: float = 2.0

    def run(self, module):
        node = next(node for node in module.graph.nodes if node.op == "call_module" and node.target == "2")
        with module.graph.inserting_after(node):
            scaled = module.graph.call_function(torch.mul, (node, self.factor))
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        return 1


@dataclass(frozen=True)
class BreakOrder(Pass):
    def run(self, module):
        nodes = list(module.graph.nodes)
        nodes[1].append(nodes[0])
        return 1


@dataclass(frozen=True)
class Miscount(Pass):
    def run(self, module):
        return None


# ---- text ----


@pytest.mark.parametrize(
    "text",
    [
        "remove-dead-code",
        "remove-dead-code, fold-constants{max_bytes=4096}",
        "fold-constants{max_bytes=1, freeze=true}, merge-common",
        'replace-module{old=torch.nn.ReLU, new=torch.nn.GELU}, propagate-shapes{inputs="1x3x4x4:float32 2:int64"}',
        "",
    ],
)
def test_text_is_read_and_printed_back(text):
    assert str(Pipeline(text)) == text
    assert Pipeline(str(Pipeline(text))) == Pipeline(text)


def test_spaces_and_defaults():
    pipeline = Pipeline("  remove-dead-code ,fold-constants{ max_bytes = 1048576 , freeze=TRUE}")
    assert str(pipeline) == "remove-dead-code, fold-constants{freeze=true}"
    assert repr(pipeline) == "Pipeline('remove-dead-code, fold-constants{freeze=true}')"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("remove-dead-code,", "cannot read the pipeline 'remove-dead-code,' at 'its end'"),
        ("fold-constants{max_bytes=1", "cannot read the pipeline"),
        ("fold-constants{max_bytes}", "cannot read the options of fold-constants at 'max_bytes'; write option=value"),
        ("fold-constants{max_bytes=many}", "the option max_bytes of fold-constants must be of type int, not 'many'"),
        ("fold-constants{freeze=1}", "must be of type bool, not '1'"),
        ("remove-dead-code{a=1}", "remove-dead-code has no option 'a'; it has none"),
        ("fold_constant", "no pass is called 'fold_constant'; did you mean 'fold-constants'"),
        ("zzz", "known: remove-dead-code, merge-common"),
    ],
)
def test_mistakes_in_the_text(text, message):
    with pytest.raises(PassError) as error:
        Pipeline(text)
    assert message in str(error.value)


@given(st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)))
def test_options_survive_the_text(value):
    @dataclass(frozen=True)
    class Holder(Pass):
        option: object = ("no", "default")

    passes_registry._registered["holder"] = Holder
    try:
        (found,) = Pipeline(f"holder{{option={option_text(value)}}}").passes
    finally:
        del passes_registry._registered["holder"]
    assert found.option == value and type(found.option) is type(value)


def test_passes_as_objects():
    pipeline = Pipeline(["remove-dead-code", find("fold-constants")(max_bytes=8), "merge-common, functionalize"])
    assert str(pipeline) == "remove-dead-code, fold-constants{max_bytes=8}, merge-common, functionalize"
    with pytest.raises(PassError, match="call the class to make one"):
        Pipeline([find("fold-constants")])


def test_every_built_in_pass_is_found_by_its_name():
    for name in names():
        assert find(name)().name == name and str(find(name)()) == name


# ---- registry ----


def test_register():
    register(ScaleByTwo)
    try:
        assert "scale-by-two" in names()
        assert str(Pipeline("scale-by-two{factor=3}")) == "scale-by-two{factor=3}"
    finally:
        del passes_registry._registered["scale-by-two"]
    with pytest.raises(PassError, match="no subclass"):
        register(int)
    with pytest.raises(PassError, match="torchgraft has a pass 'merge-common' already"):
        register(type("MergeCommon", (Pass,), {}))


def test_entry_points(monkeypatch):
    here = f"{__name__}:ScaleByTwo"
    entries = [
        importlib.metadata.EntryPoint("theirs", here, "torchgraft.passes"),
        importlib.metadata.EntryPoint("broken", "no_such_package:Thing", "torchgraft.passes"),
        importlib.metadata.EntryPoint("wrong", "builtins:int", "torchgraft.passes"),
    ]
    monkeypatch.setattr(passes_registry, "_entry_points", lambda: entries)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", _load)
    assert find("theirs").__name__ == "ScaleByTwo"
    assert "theirs" in names()
    with pytest.raises(PassError, match="cannot load the pass 'broken' from no_such_package:Thing"):
        find("broken")
    with pytest.raises(PassError, match="which is no subclass of Pass"):
        find("wrong")


def _load(entry):
    if entry.name == "theirs":
        return ScaleByTwo
    if entry.name == "wrong":
        return int
    raise ImportError("no such package")


# ---- running ----


def test_report():
    program = torchgraft.symbolic_trace(small())
    before = len(program.graph.nodes)
    report = Pipeline("fuse-conv-norm, remove-dead-code")(program)
    assert [(step.name, step.changes, step.nodes_before, step.nodes_after) for step in report.passes] == [
        ("fuse-conv-norm", 1, before, before - 1),
        ("remove-dead-code", 0, before - 1, before - 1),
    ]
    assert report.changes == 1 and report.seconds > 0
    lines = str(report).splitlines()
    assert lines[0].split() == ["pass", "changes", "ms", "nodes"]
    assert lines[1].split()[0] == "fuse-conv-norm" and lines[1].endswith(f"{before} -> {before - 1}")


def test_in_place_and_the_model_is_left_alone():
    model = small()
    state = copy.deepcopy(model.state_dict())
    program = torchgraft.symbolic_trace(model)
    expected = model(IMAGE)
    graph = program.graph
    Pipeline("fuse-conv-norm, fuse-activations, normalize-arguments")(program)
    assert program.graph is graph
    torch.testing.assert_close(program(IMAGE), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(IMAGE), expected)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_nothing_to_run():
    program = torchgraft.symbolic_trace(small())
    assert Pipeline("")(program).passes == ()


def test_check_names_the_pass_and_the_first_node():
    program = torchgraft.symbolic_trace(small())
    with pytest.raises(PassError) as error:
        Pipeline(["remove-dead-code", ScaleByTwo(), "merge-common"])(program, check=IMAGE)
    text = str(error.value)
    assert text.startswith(
        "the pass scale-by-two changed what the program computes\nresult: 4 of 4 values differ, by up to "
    )
    assert "\nfirst node that differs: '_3'" in text and text.endswith("\nleave the pass out, or fix it")


def test_check_passes_what_is_right():
    program = torchgraft.capture(small(), (IMAGE,), level="function")
    report = Pipeline("fuse-conv-norm, propagate-shapes, reorder-for-memory, normalize-arguments")(
        program, check=(IMAGE,)
    )
    assert report.passes[0].changes == 1 and report.passes[1].changes > 0


def test_check_leaves_state_and_random_numbers_alone():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    program = torchgraft.symbolic_trace(model)
    state, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    Pipeline("remove-dead-code, merge-common")(
        program, check=torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    )
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)


def test_check_sees_written_inputs_and_buffers():
    @dataclass(frozen=True)
    class DropWrites(Pass):
        def run(self, module):
            writes = [node for node in module.graph.nodes if node.target == "add_"]
            for node in writes:
                module.graph.erase_node(node)
            return len(writes)

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return x * 2

    with pytest.raises(PassError, match="buffer 'count'"):
        Pipeline([DropWrites()])(torchgraft.symbolic_trace(Counter()), check=torch.ones(2))

    def write_input(x):
        x.add_(1)
        return torch.zeros(1)

    with pytest.raises(PassError, match=r"inputs\[0\]: 2 of 2 values differ"):
        Pipeline([DropWrites()])(torchgraft.symbolic_trace(write_input), check=torch.ones(2))


def test_check_says_when_a_program_stopped_running():
    @dataclass(frozen=True)
    class WrongTarget(Pass):
        def run(self, module):
            next(node for node in module.graph.nodes if node.op == "call_function").target = torch.linalg.inv
            return 1

    program = torchgraft.symbolic_trace(lambda x: torch.relu(x))
    with pytest.raises(PassError, match="the pass wrong-target broke the program: it ran before, and now it raises"):
        Pipeline([WrongTarget()])(program, check=torch.ones(3))


def test_check_with_random_draws_and_not_a_number():
    program = torchgraft.symbolic_trace(lambda x: torch.rand(3) + x / x)
    Pipeline("merge-common, remove-dead-code")(program, check=torch.zeros(3))


def test_every_pass_is_verified():
    program = torchgraft.symbolic_trace(lambda x: torch.relu(x))
    with pytest.raises(PassError, match="break-order left a program that is not well formed; fix the pass"):
        Pipeline([BreakOrder()])(program)


def test_a_pass_must_count():
    with pytest.raises(PassError, match="miscount returned None instead of the number of its changes"):
        Miscount()(torchgraft.symbolic_trace(lambda x: x))
    with pytest.raises(PassError, match="has no graph; capture it first"):
        find("merge-common")()(nn.ReLU())
    assert issubclass(PassError, GraftError)


def test_observers_and_history():
    steps = []
    program = torchgraft.symbolic_trace(small())
    pipeline = Pipeline("fuse-conv-norm, fuse-activations", observers=[steps.append], history=True)
    expected = program(IMAGE)
    report = pipeline(program)
    assert [(step.number, step.edit.name, step.report.changes) for step in steps] == [
        (1, "fuse-conv-norm", 1),
        (2, "fuse-activations", 1),
    ]
    assert all(step.program is program for step in steps)
    assert [name for name, _ in report.history] == ["", "fuse-conv-norm", "fuse-activations"]
    # Every kept program runs, with the weights it had.
    before, fused, _ = [kept for _, kept in report.history]
    assert torch.equal(before(IMAGE), expected)
    assert len(before.graph.nodes) == len(fused.graph.nodes) + 1
    torch.testing.assert_close(fused(IMAGE), expected, rtol=1e-4, atol=1e-5)


# ---- the pass of the documentation ----


def documented_pass():
    """The ten lines of docs/passes.md."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "passes.md").read_text()
    source = next(block for block in text.split("```python\n") if block.startswith("from dataclasses")).partition(
        "```"
    )[0]
    scope = {}
    exec(source, scope)
    assert len([line for line in source.splitlines() if line.strip()]) <= 14
    return scope["GeluToRelu"]


def test_a_pass_written_by_a_user():
    cls = documented_pass()
    torch.manual_seed(0)
    layers = [layer for _ in range(9) for layer in (nn.Linear(8, 8), nn.GELU())]
    program = torchgraft.symbolic_trace(nn.Sequential(*layers))
    assert len(program.graph.nodes) == 20
    report = cls()(program)
    assert report.changes == 9 and report.name == "gelu-to-relu" and 0 < report.seconds < 60
    assert report.nodes_before == report.nodes_after == 20
    assert cls()(program).changes == 0
    x = torch.randn(4, 8)
    expected = x
    for layer in layers:
        expected = torch.relu(expected) if isinstance(layer, nn.GELU) else layer(expected)
    assert torch.equal(program(x), expected)


class Cache:
    """A result of the user's own kind, which says nothing about equality."""

    def __init__(self, keys: torch.Tensor, step: int) -> None:
        self.layers = [keys, {"double": keys * 2}]
        self.step = step
        self.itself = self


class Caching(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        return x + 1, Cache(torch.relu(x), x.shape[0])


def test_objects_that_a_program_returns_are_compared_by_what_they_hold() -> None:
    x = torch.randn(3)
    program = torchgraft.capture(Caching(), (x,))
    Pipeline("remove-dead-code, merge-common, fold-constants")(program, check=x)

    @dataclass(frozen=True)
    class Breaks(Pass):
        def run(self, module: torchgraft.GraphModule) -> int:
            for node in module.graph.nodes:
                if node.target is torch.relu:
                    node.target = torch.neg
            return 1

    with pytest.raises(PassError, match=r"(?s)changed what the program computes.*'relu'"):
        Pipeline([Breaks()])(program, check=x)


def test_the_check_reads_results_of_every_structure():
    program = torchgraft.symbolic_trace(lambda x: {"first": [x, (x + 1,)], "second": {"third": x * 2}})
    assert Pipeline("merge-common")(program, check=torch.ones(2)).changes == 0
