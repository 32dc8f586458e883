"""Leaf functions: marked by `wrap` here or by torch.fx.wrap in a library, or found by a tracer's autowrap lists.
The marks themselves are in tests/ir/test_leaf_functions.py.
"""

import importlib
import importlib.util
import math
import random
import sys

import torch
from torch import nn

import torchgraft as fx
from torchgraft.analysis.effects.declared import is_declared_pure
from torchgraft.ir import leaf_functions


@fx.wrap
def leaf(x, scale=1):
    assert not isinstance(x, fx.Proxy)
    return x * scale


def helper(x):
    return leaf(x) + 1


fx.wrap("len")


def targets(graph: fx.Graph) -> list:
    return [node.target for node in graph.nodes if node.op == "call_function"]


class TestWrap:
    def test_a_call_with_traced_values_is_one_node(self) -> None:
        program = fx.symbolic_trace(lambda x: leaf(x, scale=3))
        assert targets(program.graph) == [leaf]
        assert program(2) == 6

    def test_a_call_without_traced_values_runs(self) -> None:
        program = fx.symbolic_trace(lambda x: x + leaf(2, 3))
        assert len(program.graph.nodes) == 3
        assert program(1) == 7

    def test_traced_values_deep_inside_arguments_are_found(self) -> None:
        program = fx.symbolic_trace(lambda x: len([x, {"k": (x,)}]))
        assert targets(program.graph) == [len]
        assert program(1) == 2

    def test_called_from_a_function_of_the_same_module(self) -> None:
        assert leaf in targets(fx.symbolic_trace(lambda x: helper(x)).graph)

    def test_the_name_is_itself_after_the_trace(self) -> None:
        before = leaf
        fx.symbolic_trace(lambda x: leaf(x))
        assert leaf is before
        assert "len" not in globals()

    def test_a_leaf_stays_one_when_the_program_is_traced_again(self) -> None:
        first = fx.symbolic_trace(lambda x: leaf(x) + len(x))
        second = fx.symbolic_trace(first)
        assert targets(second.graph) == targets(first.graph)
        assert second.code == first.code

    def test_a_leaf_stays_one_when_a_captured_program_is_traced(self) -> None:
        for level in ("module", "function", "aten"):
            program = fx.capture(lambda x: leaf(x.sin()), torch.ones(3), level=level)
            for traced in (fx.symbolic_trace(program), fx.capture(program, torch.ones(3))):
                assert leaf in targets(traced.graph)
                assert torch.equal(traced(torch.ones(3)), torch.ones(3).sin())

    def test_generated_code_says_so(self) -> None:
        assert 'wrap("' in fx.symbolic_trace(lambda x: leaf(x)).code

    def test_the_function_seen_inside_is_the_real_one(self) -> None:
        program = fx.symbolic_trace(lambda x: leaf(x))
        assert targets(program.graph)[0] is leaf


LIBRARY = """
import torch
import torch.fx

def _leaf(x, n):
    for _ in range(int(x.shape[0])):
        x = x + n
    return x

torch.fx.wrap("_leaf")

class Layer(torch.nn.Module):
    def forward(self, x):
        return _leaf(x, 2) * 2
"""


def test_a_leaf_that_a_library_marked_for_torch_fx_is_honoured(tmp_path) -> None:
    path = tmp_path / "some_library.py"
    path.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("some_library", path)
    library = importlib.util.module_from_spec(spec)
    sys.modules["some_library"] = library
    try:
        spec.loader.exec_module(library)
        program = fx.symbolic_trace(nn.Sequential(library.Layer()))
        assert library._leaf in targets(program.graph)
        assert torch.equal(program(torch.ones(3)), library.Layer()(torch.ones(3)))
    finally:
        del sys.modules["some_library"]


CHOOSES = """
import torch

def _groups(x):
    return x * 2 if torch.compiler.is_compiling() else x + x

class Experts(torch.nn.Module):
    def forward(self, x):
        return _groups(x) + 1
"""


def test_what_asks_whether_it_is_compiled_is_asked_when_the_program_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(leaf_functions, "_CHOOSES_WHEN_COMPILED", (("library_of_experts", "_groups"),))
    path = tmp_path / "library_of_experts.py"
    path.write_text(CHOOSES)
    monkeypatch.syspath_prepend(tmp_path)
    library = importlib.import_module("library_of_experts")
    try:
        for level in ("module", "function", "aten", "core_aten"):
            program = fx.capture(library.Experts(), torch.ones(3), level=level)
            assert library._groups in targets(program.graph)
            assert is_declared_pure(library._groups)
            compiled: list[str] = []

            def backend(module, inputs, compiled=compiled):
                compiled += [str(node.target) for node in module.graph.nodes]
                return module.forward

            torch._dynamo.reset()
            assert torch.equal(
                torch.compile(program, backend=backend, fullgraph=True)(torch.ones(3)), torch.full((3,), 3.0)
            )
            assert any("mul" in name for name in compiled), compiled
    finally:
        del sys.modules["library_of_experts"]


class TestAutowrap:
    def test_math_by_default(self) -> None:
        program = fx.symbolic_trace(lambda x: math.sqrt(x.shape[0]) * x)
        assert math.sqrt in targets(program.graph)
        assert torch.equal(program(torch.ones(4)), torch.full((4,), 2.0))

    def test_math_with_plain_numbers_is_computed(self) -> None:
        assert len(fx.symbolic_trace(lambda x: x * math.sqrt(4)).graph.nodes) == 3

    def test_functions_of_the_users_choice(self) -> None:
        def chosen(x):
            return x + 1

        scope = {"chosen": chosen}
        exec("def forward(x): return chosen(x) * 2", scope)
        tracer = fx.Tracer(autowrap_functions=(chosen,))
        assert chosen in targets(tracer.trace(scope["forward"]))
        assert chosen not in targets(fx.Tracer().trace(scope["forward"]))
        assert scope["chosen"] is chosen

    def test_modules_of_the_users_choice(self) -> None:
        import operator

        tracer = fx.Tracer(autowrap_modules=(math, operator))
        graph = tracer.trace(lambda x: operator.add(x, 1))
        assert targets(graph) == [operator.add]

    def test_a_name_imported_into_the_namespace(self) -> None:
        scope: dict = {}
        exec("from math import sqrt\ndef forward(x): return sqrt(x)", scope)
        graph = fx.Tracer().trace(scope["forward"])
        assert targets(graph) == [math.sqrt]
        assert scope["sqrt"] is math.sqrt


class TestRandomState:
    def test_python_random_numbers_are_drawn_when_the_program_runs(self) -> None:
        random.seed(0)
        before = random.getstate()
        program = fx.symbolic_trace(lambda x: x + random.random() + random.uniform(0, 1))
        assert random.getstate() == before
        random.seed(3)
        answer = program(0.0)
        random.seed(3)
        assert answer == random.random() + random.uniform(0, 1)

    def test_setting_the_seed_happens_when_the_program_runs(self) -> None:
        def forward(x):
            torch.manual_seed(3)
            return x + torch.rand(2)

        torch.manual_seed(1)
        before = torch.get_rng_state()
        program = fx.symbolic_trace(forward)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(program(torch.zeros(2)), program(torch.zeros(2)))

    def test_numpy_random_numbers_are_recorded_or_refused(self) -> None:
        import numpy

        try:
            program = fx.symbolic_trace(lambda x: x + numpy.random.rand())
        except fx.TraceError:
            return
        assert program(0.0) != program(0.0)
