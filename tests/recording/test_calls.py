"""log_calls: the calls of the article's MLP exactly as its two bare modes print them, and every other promise about a log."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

import torchgraft
from torchgraft.errors import RunError, WriteError
from torchgraft.zoo.mlp import MLP


class FunctionLog(TorchFunctionMode):
    """The first of the two bare modes, keeping the names it would print."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args, kwargs=None):
        self.names.append(f"{resolve_name(func)}")
        return func(*args, **(kwargs or {}))


class DispatchLog(TorchDispatchMode):
    """The second."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args, kwargs=None):
        self.names.append(f"{func}")
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def mlp() -> torch.nn.Module:
    return MLP().eval()


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(1, 16)


@pytest.fixture(scope="module")
def exported(mlp: torch.nn.Module, x: torch.Tensor):
    return torch.export.export(mlp, (x,))


@pytest.fixture(scope="module")
def core(exported):
    return exported.run_decompositions()


def bare(mode, fn, x: torch.Tensor) -> list[str]:
    with torch.inference_mode(), mode:
        fn(x)
    return mode.names


# ---- the calls of the article ----

SUBJECTS = ["module", "torch.fx", "exported", "core"]


@pytest.fixture(params=SUBJECTS)
def subject(request, mlp, exported, core):
    """What the article runs under its modes, written there as four alternatives; the last two make their module inside."""
    return {
        "module": mlp,
        "torch.fx": torch.fx.symbolic_trace(mlp),
        "exported": lambda x: exported.module()(x),
        "core": lambda x: core.module()(x),
    }[request.param]


def test_the_functions_are_those_the_bare_mode_names(subject, x) -> None:
    expected = bare(FunctionLog(), subject, x)
    with torch.inference_mode():
        found = torchgraft.log_calls(subject, x).names
    # Where torch has no name for a function the bare mode prints "None"; the log has the name it goes by.
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == theirs or (theirs == "None" and mine != "None")


def test_the_operators_are_those_the_bare_mode_names(subject, x) -> None:
    expected = bare(DispatchLog(), subject, x)
    with torch.inference_mode():
        assert torchgraft.log_calls(subject, x, level="dispatch").names == expected


def test_the_first_lines_that_the_article_prints(core, x) -> None:
    with torch.inference_mode():
        log = torchgraft.log_calls(lambda x: core.module()(x), x)
    assert log.names[:3] == ["torch.Tensor.grad_fn.__get__"] * 3


def test_the_operators_of_the_core_aten_program(core, x) -> None:
    with torch.inference_mode():
        assert torchgraft.log_calls(core, x, level="dispatch").names == [
            "aten.permute.default",
            "aten.addmm.default",
            "aten.relu.default",
            "aten.permute.default",
            "aten.addmm.default",
        ]


def test_the_functions_of_the_plain_module(mlp, x) -> None:
    assert torchgraft.log_calls(mlp, x).names == [
        "torch.nn.functional.linear",
        "torch.nn.functional.relu",
        "torch.nn.functional.linear",
    ]


# ---- what is said about a call ----


def test_everything_about_one_call(mlp, x) -> None:
    call = torchgraft.log_calls(mlp, x)[0]
    assert call.arguments == "float32[1, 16], float32[32, 16], float32[32]"
    assert (call.shape, call.dtype, call.result) == ((1, 32), "float32", "float32[1, 32]")
    assert call.module == "fc1"
    assert "mlp.py:" in call.line and "self.relu(self.fc1(x))" in call.line
    assert 0 <= call.start < 60 and 0 < call.seconds < 60
    assert str(call) == f"torch.nn.functional.linear({call.arguments}) -> float32[1, 32]"


def test_a_result_is_kept(mlp, x) -> None:
    assert torch.equal(torchgraft.log_calls(mlp, x).result, mlp(x))


@pytest.mark.parametrize("level", ["function", "dispatch"])
@pytest.mark.parametrize("make", [torchgraft.symbolic_trace, torch.fx.symbolic_trace], ids=["ours", "torch.fx"])
def test_programs_have_the_paths_of_the_model(mlp, x, level, make) -> None:
    log = torchgraft.log_calls(make(mlp), x, level=level)
    assert [*dict.fromkeys(call.module for call in log)] == ["fc1", "relu", "fc2"]


def test_a_program_of_functions_knows_modules_and_lines_of_the_model(mlp, x) -> None:
    log = torchgraft.log_calls(torchgraft.capture(mlp, (x,), level="function"), x).filter(where=lambda call: call.dtype)
    assert log.filter(name="linear").names == ["torch.nn.functional.linear"] * 2
    assert [call.module for call in log.filter(name="linear")] == ["fc1", "fc2"]
    assert all("mlp.py:" in call.line for call in log.filter(name="linear"))


def test_an_exported_program_knows_modules_and_lines_of_the_model(exported, x) -> None:
    log = torchgraft.log_calls(exported, x).filter(name="aten.*")
    assert [call.module for call in log] == ["fc1", "relu", "fc2"]
    assert all("mlp.py:" in call.line for call in log)


def test_a_shared_module_has_the_path_it_is_called_by() -> None:
    class Block(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)

    shared = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(Block(shared), Block(shared))
    assert [call.module for call in torchgraft.log_calls(model, torch.ones(1, 2))] == ["0.layer", "1.layer"]


def test_modules_used_by_a_function_and_made_on_the_way(x) -> None:
    layer = torch.nn.Linear(16, 2)

    def function(value):
        return torch.nn.Tanh()(layer(value))

    log = torchgraft.log_calls(function, x)
    assert [call.module for call in log if call.name in ("torch.nn.functional.linear", "torch.tanh")] == [
        "layer",
        "Tanh",
    ]


def test_arguments_in_short() -> None:
    def function(x, table):
        torch.cat([x] * 20)
        x.sum(dim=1, keepdim=True)
        x[..., 1:2]
        return torch.zeros(3, dtype=torch.int64)

    texts = [call.arguments for call in torchgraft.log_calls(function, (torch.ones(2, 3), {"a": 1}))]
    assert texts[0] == f"[{', '.join(['float32[2, 3]'] * 8)}, …]"
    assert texts[1] == "float32[2, 3], dim=1, keepdim=True"
    assert texts[2] == "float32[2, 3], (…, 1:2)"
    assert texts[3] == "3, dtype=torch.int64"


def test_odd_tensors_are_described(x) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    log = torchgraft.log_calls(lambda: (torch.eye(2).to_sparse(), nested + nested, torch.ones(0, 3).to("meta")))
    assert log[1].result == "float32[2, 2]"
    assert any("[?]" in call.result for call in log)
    assert log[-1].result == "float32[0, 3]@meta"


def test_a_shape_that_a_call_changes_is_that_from_before() -> None:
    call = torchgraft.log_calls(lambda x: x.unsqueeze_(0), torch.ones(3))[0]
    assert (call.arguments, call.result) == ("float32[3], 0", "float32[1, 3]")


def test_no_tensor_is_kept_alive() -> None:
    import gc
    import weakref

    seen = []

    def function(x):
        seen.append(weakref.ref(torch.relu(x)))
        return None

    log = torchgraft.log_calls(function, torch.ones(3))
    gc.collect()
    assert len(log) == 1 and seen[0]() is None


# ---- filtering ----


def test_filters(mlp, x) -> None:
    log = torchgraft.log_calls(mlp, x, level="dispatch")
    assert set(log.filter(name="aten.addmm.*").names) == {"aten.addmm.default"}
    assert log.filter(name="addmm").names == log.filter(name="aten.addmm.default").names
    assert {call.module for call in log.filter(module="fc*")} == {"fc1", "fc2"}
    assert len(log.filter(where=lambda call: call.shape == (1, 16))) == 1
    assert len(log.filter(name="no_such")) == 0
    both = log.filter(name="addmm", module="fc1")
    assert [call.module for call in both] == ["fc1"] and both.level == "dispatch"
    assert isinstance(log[:2], torchgraft.recording.calls.CallLog) and len(log[:2]) == 2
    assert log.counts["aten.addmm.default"] == 2


def test_a_module_stands_for_what_is_inside_it() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.ReLU())
    assert [call.module for call in torchgraft.log_calls(model, torch.ones(1, 2)).filter(module="0")] == ["0.0"]


# ---- other forms ----


def test_text(mlp, x) -> None:
    lines = str(torchgraft.log_calls(mlp, x)).splitlines()
    assert lines[0].split() == ["#", "call", "arguments", "result", "module", "time", "line"]
    assert lines[1].startswith("0  torch.nn.functional.linear  float32[1, 16], float32[32, 16], float32[32]  ")
    assert lines[-1].startswith("3 calls at level function, ")


def test_json_and_rows(mlp, x, tmp_path) -> None:
    log = torchgraft.log_calls(mlp, x)
    data = json.loads(log.to_json(tmp_path / "calls.json"))
    assert json.loads((tmp_path / "calls.json").read_text()) == data
    assert data["level"] == "function" and [row["name"] for row in data["calls"]] == log.names
    assert log.rows()[0]["shape"] == [1, 32] and log.rows()[0]["module"] == "fc1"


def test_chrome_trace(mlp, x, tmp_path) -> None:
    log = torchgraft.log_calls(mlp, x)
    log.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X"}
    calls = [event for event in events if event["cat"] == "function"]
    modules = {event["name"]: event for event in events if event["cat"] == "module"}
    assert [event["name"] for event in calls] == log.names and set(modules) == {"model", "fc1", "relu", "fc2"}
    inside, outside = calls[0], modules["fc1"]
    assert outside["ts"] <= inside["ts"] and inside["ts"] + inside["dur"] <= outside["ts"] + outside["dur"]
    assert inside["args"]["arguments"] == log[0].arguments


def test_html_is_escaped() -> None:
    log = torchgraft.log_calls(lambda x: torch.einsum("i->i", x), torch.ones(2))
    page = log._repr_html_()
    assert page.startswith("<table>") and "i-&gt;i" in page and "i->i" not in page


def test_a_table_on_a_terminal_and_text_elsewhere(mlp, x) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    log = torchgraft.log_calls(mlp, x)
    terminal, pipe = Terminal(), io.StringIO()
    log.show(terminal)
    log.show(pipe)
    assert "┃" in terminal.getvalue()
    assert pipe.getvalue() == f"{log}\n"


def test_an_empty_log_can_be_shown() -> None:
    log = torchgraft.log_calls(lambda: 3)
    assert len(log) == 0 and log.result == 3 and "0 calls" in str(log)
    assert json.loads(log.to_chrome_trace())["traceEvents"] == [] and "<table>" in log._repr_html_()


def test_an_unwritable_folder(mlp, x, tmp_path) -> None:
    log = torchgraft.log_calls(mlp, x)
    with pytest.raises(WriteError, match="cannot write .*missing/calls.json': No such file or directory\ngive a path"):
        log.to_json(tmp_path / "missing" / "calls.json")
    with pytest.raises(WriteError, match="it is a folder"):
        log.to_chrome_trace(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- what goes wrong ----


def test_a_model_that_fails_midway_leaves_its_log() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(5, 6))
    with pytest.raises(
        RunError, match="Sequential raised RuntimeError: .* after 3 calls, the last one torch.nn.func"
    ) as e:
        torchgraft.log_calls(model, torch.ones(2, 3))
    log = e.value.partial
    assert e.value.__notes__ == ["what was written down until then is this error's `partial`"]
    assert log.names == ["torch.nn.functional.linear", "torch.nn.functional.relu", "torch.nn.functional.linear"]
    assert [call.error for call in log] == ["", "", "RuntimeError"] and log[-1].module == "2"
    assert isinstance(e.value.__cause__, RuntimeError) and "raised RuntimeError" in str(log)


def test_an_error_that_the_model_handles_is_in_the_log() -> None:
    def function(x):
        try:
            x @ torch.ones(7, 7)
        except RuntimeError:
            return x.relu()

    log = torchgraft.log_calls(function, torch.ones(2, 3))
    assert [call.error for call in log] == ["", "RuntimeError", ""] and log[-1].name == "torch.Tensor.relu"


def test_a_module_whose_error_is_handled_does_not_stay_open() -> None:
    broken = torch.nn.Linear(5, 5)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.broken = broken

        def forward(self, x):
            try:
                self.broken(x)
            except RuntimeError:
                return torch.relu(x)

    assert torchgraft.log_calls(Model(), torch.ones(1, 2))[-1].module == ""


def test_nothing_is_left_behind(mlp, x) -> None:
    hooks = torch.nn.modules.module
    for fails in (False, True):
        model = torch.nn.Linear(3, 3) if fails else mlp
        try:
            torchgraft.log_calls(model, x)
        except RunError:
            assert fails
        assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
        assert not model._forward_hooks
    assert torch._C._len_torch_function_stack() == 0


def test_other_threads_are_not_logged(x) -> None:
    def function(value):
        thread = threading.Thread(target=lambda: torch.nn.Linear(16, 2)(value))
        thread.start()
        thread.join()
        return torch.relu(value)

    assert torchgraft.log_calls(function, x).names == ["torch.relu"]


def test_bad_arguments(mlp, x) -> None:
    with pytest.raises(ValueError, match="""level must be "function" or "dispatch", not 'aten'"""):
        torchgraft.log_calls(mlp, x, level="aten")
    with pytest.raises(TypeError, match="expected a model, a program or a function to call, got int"):
        torchgraft.log_calls(3)


def test_nan_in_arguments_is_no_trouble() -> None:
    log = torchgraft.log_calls(lambda x: x * float("nan"), torch.ones(2))
    assert log[0].arguments == "float32[2], nan"
    json.loads(log.to_json(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def test_keyword_arguments_and_gradients() -> None:
    def function(x, *, scale):
        (x * scale).sum().backward()

    log = torchgraft.log_calls(function, torch.ones(3, requires_grad=True), {"scale": 2}, level="dispatch")
    assert log.names[0] == "aten.mul.Tensor" and log.filter(name="ones_like") and all(call.line for call in log)
