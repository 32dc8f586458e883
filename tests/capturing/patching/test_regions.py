"""Regions: contexts of torch that a traced program enters and leaves, with their arguments, in `with` blocks.
The two calls they are made of are in tests/ir/test_contexts.py.
"""

import pytest
import torch
from torch import nn

import torchgraft as fx
from tests.capturing.comparison import in_another_thread


@pytest.fixture(autouse=True)
def _modes_as_before():
    yield
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)


def lines(program: fx.GraphModule) -> list[str]:
    return [line.strip() for line in program.code.splitlines() if line.strip().startswith("with ")]


def leaf() -> torch.Tensor:
    return torch.ones(2, 2, requires_grad=True)


class TestGradMode:
    def test_nested(self) -> None:
        def forward(x):
            with torch.no_grad():
                a = x * 2
                with torch.enable_grad():
                    b = x * 3
                c = x * 4
            return a, b, c, x * 5

        program = fx.symbolic_trace(forward)
        assert lines(program) == ["with torch.no_grad():", "with torch.enable_grad():"]
        assert [value.requires_grad for value in program(leaf())] == [False, True, False, True]
        interpreted = fx.Interpreter(program).run(leaf())
        assert [value.requires_grad for value in interpreted] == [False, True, False, True]

    @pytest.mark.parametrize("mode", [True, False])
    def test_set_grad_enabled_as_a_block(self, mode: bool) -> None:
        def forward(x):
            with torch.set_grad_enabled(mode):
                y = x * 2
            return y, x * 3

        program = fx.symbolic_trace(forward)
        assert lines(program) == [f"with torch.set_grad_enabled({mode}):"]
        assert [value.requires_grad for value in program(leaf())] == [mode, True]

    def test_set_grad_enabled_as_a_function(self) -> None:
        def forward(x):
            torch.set_grad_enabled(False)
            y = x * 2
            torch.set_grad_enabled(True)
            return y, x * 3

        program = fx.symbolic_trace(forward)
        assert [value.requires_grad for value in program(leaf())] == [False, True]
        assert torch.is_grad_enabled()

    def test_tracing_leaves_the_mode_as_it_was(self) -> None:
        def forward(x):
            torch.set_grad_enabled(False)
            return x * 2

        fx.symbolic_trace(forward)
        assert torch.is_grad_enabled()

    def test_a_decorated_forward_of_the_root(self) -> None:
        class Model(nn.Module):
            @torch.no_grad()
            def forward(self, x):
                return x * 2

        program = fx.symbolic_trace(Model())
        assert lines(program) == ["with torch.no_grad():"]
        assert not program(leaf()).requires_grad

    def test_a_decorated_function_inside(self) -> None:
        @torch.no_grad()
        def target(x):
            return x * 2

        program = fx.symbolic_trace(lambda x: (target(x), x * 3))
        assert [value.requires_grad for value in program(leaf())] == [False, True]

    def test_a_decorated_generator(self) -> None:
        @torch.no_grad()
        def values(x):
            yield x * 2
            yield x * 3

        program = fx.symbolic_trace(lambda x: [value + x for value in values(x)])
        assert [value.requires_grad for value in program(leaf())] == [True, True]
        assert len(lines(program)) == 2

    def test_returning_from_inside(self) -> None:
        def forward(x):
            with torch.no_grad():
                return x * 2

        assert not fx.symbolic_trace(forward)(leaf()).requires_grad

    def test_the_mode_in_which_the_trace_began_is_not_recorded(self) -> None:
        with torch.no_grad():
            program = fx.symbolic_trace(lambda x: x * 2)
        assert lines(program) == []
        assert program(leaf()).requires_grad


class TestOtherContexts:
    def test_inference_mode(self) -> None:
        def forward(x):
            with torch.inference_mode():
                a = x * 2
            with torch.inference_mode(False):
                b = x * 3
            return a, b

        program = fx.symbolic_trace(forward)
        assert lines(program) == ["with torch.inference_mode(True):", "with torch.inference_mode(False):"]
        assert [value.is_inference() for value in program(leaf())] == [True, False]

    def test_inference_mode_as_a_decorator(self) -> None:
        class Model(nn.Module):
            @torch.inference_mode()
            def forward(self, x):
                return x * 2

        assert fx.symbolic_trace(Model())(leaf()).is_inference()

    def test_autocast_with_all_its_arguments(self) -> None:
        def forward(x):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True, cache_enabled=False):
                a = x @ x
            with torch.autocast("cpu", enabled=False):
                b = x @ x
            with torch.amp.autocast(device_type="cpu"):
                c = x @ x
            with torch.autocast("cpu", dtype=torch.float16):
                d = x @ x
            return a, b, c, d, x @ x

        program = fx.symbolic_trace(forward)
        assert lines(program)[0] == (
            "with torch.autocast('cpu', dtype = torch.bfloat16, enabled = True, cache_enabled = False):"
        )
        expected = [value.dtype for value in forward(leaf())]
        assert [value.dtype for value in program(leaf())] == expected
        assert expected == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.float32]

    def test_autocast_as_a_decorator(self) -> None:
        class Model(nn.Module):
            @torch.autocast("cpu", dtype=torch.bfloat16)
            def forward(self, x):
                return x @ x

        assert fx.symbolic_trace(Model())(leaf()).dtype is torch.bfloat16

    @pytest.mark.parametrize("arguments", [("part",), ("part", "details")])
    def test_record_function(self, arguments) -> None:
        def forward(x):
            with torch.profiler.record_function(*arguments):
                return x * 2

        program = fx.symbolic_trace(forward)
        text = ", ".join(map(repr, arguments))
        assert lines(program) == [f"with torch.autograd.profiler.record_function({text}):"]
        assert torch.equal(program(leaf()), leaf() * 2)

    def test_hooks_on_saved_tensors_are_kept_or_refused(self) -> None:
        def forward(x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 10):
                return (x * x).sum()

        try:
            program = fx.symbolic_trace(forward)
        except fx.TraceError:
            return
        ours, eager = leaf(), leaf()
        program(ours).backward(), forward(eager).backward()
        assert torch.equal(ours.grad, eager.grad)

    def test_a_branch_on_the_grad_mode_is_guarded_or_refused(self) -> None:
        try:
            program = fx.symbolic_trace(lambda x: x * 2 if torch.is_grad_enabled() else x * 3)
        except fx.TraceError:
            return
        with torch.no_grad(), pytest.raises(fx.GuardError):
            program(leaf())


class TestEdges:
    def test_empty_regions_leave_nothing(self) -> None:
        def forward(x):
            with torch.no_grad(), torch.autocast("cpu"):
                pass
            with torch.no_grad(), torch.enable_grad():
                pass
            return x * 2

        assert [node.name for node in fx.symbolic_trace(forward).graph.nodes] == ["x", "mul", "output"]

    def test_an_exception_that_the_model_catches_closes_the_region(self) -> None:
        def forward(x):
            try:
                with torch.no_grad():
                    y = x * 2
                    raise KeyError
            except KeyError:
                pass
            return y, x * 3

        program = fx.symbolic_trace(forward)
        assert [value.requires_grad for value in program(leaf())] == [False, True]

    def test_an_error_while_tracing_leaves_the_modes_as_they_were(self) -> None:
        def forward(x):
            with torch.no_grad(), torch.autocast("cpu"):
                if x.sum() > 0:
                    return x

        with pytest.raises(fx.TraceError):
            fx.symbolic_trace(forward)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")

    @pytest.mark.parametrize(
        "run", [lambda p, x: p(x), lambda p, x: fx.Interpreter(p).run(x)], ids=["module", "interpreter"]
    )
    def test_an_error_while_running_leaves_the_modes_as_they_were(self, run) -> None:
        def forward(x):
            with torch.no_grad():
                with torch.autocast("cpu"):
                    y = x @ x
                return y

        program = fx.symbolic_trace(forward)
        with pytest.raises(RuntimeError):
            run(program, torch.ones(2, 3))
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")

    def test_a_region_left_open_is_refused(self) -> None:
        def forward(x):
            torch.no_grad().__enter__()
            return x * 2

        with pytest.raises(fx.GraftError, match="never closed"):
            fx.symbolic_trace(forward).code

    def test_regions_that_cross_are_refused(self) -> None:
        def forward(x):
            first, second = torch.no_grad(), torch.enable_grad()
            first.__enter__(), second.__enter__()
            y = x * 2
            first.__exit__(None, None, None), second.__exit__(None, None, None)
            return y

        with pytest.raises(fx.GraftError, match="close"):
            fx.symbolic_trace(forward).code

    def test_a_refused_region_leaves_the_mode_as_it_was(self) -> None:
        def forward(x):
            torch.no_grad().__enter__()
            return x * 2

        with pytest.raises(fx.GraftError):
            fx.symbolic_trace(forward).code
        assert torch.is_grad_enabled()

    def test_regions_of_other_threads_are_not_recorded(self) -> None:
        def forward(x):
            def elsewhere():
                with torch.no_grad():
                    torch.ones(1) * 2

            in_another_thread(elsewhere)
            return x * 2

        assert lines(fx.symbolic_trace(forward)) == []

    def test_a_leaf_module_keeps_its_own_regions(self) -> None:
        class Frozen(nn.Module):
            @torch.no_grad()
            def forward(self, x):
                return x * 2

        class Keep(fx.Tracer):
            def is_leaf_module(self, m, name):
                return True

        model = nn.Sequential(Frozen())
        program = fx.GraphModule(model, Keep().trace(model))
        assert lines(program) == []
        assert not program(leaf()).requires_grad

    def test_a_region_survives_being_traced_again(self) -> None:
        def forward(x):
            with torch.no_grad():
                return x * 2

        first = fx.symbolic_trace(forward)
        assert fx.symbolic_trace(first).code == first.code
