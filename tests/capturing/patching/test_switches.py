"""What a model asks torch about its situation becomes a guard; what it switches for everything after it is refused."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgraft as fx


class TestQuestions:
    @pytest.mark.parametrize(
        ("question", "situation"),
        [
            (lambda: torch.is_grad_enabled(), torch.no_grad),
            (lambda: torch.is_inference_mode_enabled(), torch.inference_mode),
            (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu")),
        ],
    )
    def test_the_answer_is_guarded(self, question, situation) -> None:
        model = lambda x: x * 2 if question() else x * 3
        program = fx.symbolic_trace(model)
        assert torch.equal(program(torch.ones(1)), model(torch.ones(1)))
        with situation(), pytest.raises(fx.GuardError, match="test_switches.py"):
            program(torch.ones(1))
        with situation():
            other = fx.symbolic_trace(model)
            assert torch.equal(other(torch.ones(1)), model(torch.ones(1)))

    def test_a_question_inside_a_region_has_one_answer(self) -> None:
        def model(x):
            with torch.no_grad():
                return x * 2 if torch.is_grad_enabled() else x * 3

        program = fx.symbolic_trace(model)
        assert program(torch.ones(1)) == 3
        with torch.no_grad():
            assert program(torch.ones(1)) == 3

    def test_the_default_type(self) -> None:
        program = fx.symbolic_trace(lambda x: x.to(torch.get_default_dtype()))
        assert program(torch.ones(1)).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            with pytest.raises(fx.GuardError):
                program(torch.ones(1))
        finally:
            torch.set_default_dtype(torch.float32)

    def test_regions_ask_nothing(self) -> None:
        def model(x):
            with torch.no_grad(), torch.set_grad_enabled(True), torch.autocast("cpu"):
                return x * 2

        assert fx.symbolic_trace(model).guards == []

    def test_a_trace_inside_a_trace_asks_nothing(self) -> None:
        program = fx.symbolic_trace(lambda x: fx.symbolic_trace(lambda y: y + 1).forward(x))
        assert [node.name for node in program.graph.nodes] == ["x", "add", "output"]


def adds_a_hook(x):
    handle = nn.modules.module.register_module_forward_hook(lambda *details: None)
    handle.remove()
    return x


def saves_otherwise(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda packed: packed):
        return x * x


class TestRefusals:
    @pytest.mark.parametrize(
        "model",
        [
            lambda x: torch.set_default_dtype(torch.float64),
            lambda x: torch.set_default_device("meta"),
            adds_a_hook,
            saves_otherwise,
        ],
    )
    def test_what_no_program_can_repeat(self, model) -> None:
        before = torch.get_default_dtype(), torch.empty(0).device
        with pytest.raises(fx.TraceError, match=r"cannot trace .*\n  at .*test_switches.py"):
            fx.symbolic_trace(model)
        assert (torch.get_default_dtype(), torch.empty(0).device) == before
        assert not nn.modules.module._global_forward_hooks

    def test_a_refusal_that_the_model_catches_counts(self) -> None:
        def model(x):
            try:
                torch.set_default_dtype(torch.float64)
            except Exception:
                pass
            return x

        with pytest.raises(fx.TraceError, match="set_default_dtype"):
            fx.symbolic_trace(model)

    def test_hooks_for_all_modules(self) -> None:
        handle = nn.modules.module.register_module_forward_pre_hook(lambda *details: None)
        try:
            with pytest.raises(fx.TraceError, match="hooks for all modules"):
                fx.symbolic_trace(nn.Sequential(nn.ReLU()))
        finally:
            handle.remove()

    def test_a_checkpoint_is_traced_through(self) -> None:
        program = fx.symbolic_trace(lambda x: checkpoint(torch.relu, x, use_reentrant=False))
        assert program(torch.tensor([-1.0])) == 0


class TestThreads:
    @pytest.mark.parametrize("swallows", [False, True])
    def test_work_for_another_thread_is_refused(self, swallows) -> None:
        def model(x):
            thread = threading.Thread(target=lambda: torch.relu(x))
            try:
                thread.start()
            except fx.TraceError:
                if not swallows:
                    raise
            return x

        with pytest.raises(fx.TraceError, match=r"cannot trace Thread.start\(\).*\n  at .*test_switches.py"):
            fx.symbolic_trace(model)


@pytest.mark.parametrize("level", ["module", "aten"])
def test_the_thread_of_a_progress_bar_is_nobodys_business(level) -> None:
    class Monitor(threading.Thread):
        __module__ = "tqdm._monitor"

        def run(self) -> None:
            pass

    class Model(torch.nn.Module):
        def forward(self, x):
            Monitor(daemon=True).start()
            return x * 2

    program = fx.capture(Model(), (torch.ones(3),), level=level)
    assert torch.equal(program(torch.full((3,), 2.0)), torch.full((3,), 4.0))
    assert not program.meta.get("kept_whole")
