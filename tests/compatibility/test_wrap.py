"""Leaf functions: ``wrap`` by name and as a decorator, of builtins and imported functions, and after a second trace.

Leaf modules are examined in test_tracer.
"""

import copy
import pickle

import pytest
import torch


def called(module) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


BY_NAME = """
    import torch
    import torch.fx

    def my_custom_function(x, y):
        return x * x + y * y

    torch.fx.wrap("my_custom_function")

    def fn_to_be_traced(x, y):
        # When symbolic tracing, the below call to my_custom_function will be inserted into
        # the graph rather than tracing it.
        return my_custom_function(x, y)

    traced = torch.fx.symbolic_trace(fn_to_be_traced)
"""


def test_wrap_by_name(port) -> None:
    program = port(BY_NAME)
    assert called(program.traced) == [program.my_custom_function]
    assert program.traced(3, 4) == 25


def test_wrap_as_a_decorator_returns_the_function(port) -> None:
    program = port("""
        import torch.fx

        def plain(x, y):
            return x * x + y * y

        @torch.fx.wrap
        def decorated(x, y):
            return x * x + y * y

        same = torch.fx.wrap(plain)
        name = torch.fx.wrap("plain")
        traced = torch.fx.symbolic_trace(lambda x, y: decorated(x, plain(x, y)))
    """)
    assert called(program.traced) == [program.plain, program.decorated]
    assert program.same is program.plain
    assert program.name == "plain"
    assert program.traced(1, 2) == 26
    assert program.decorated(1, 2) == 5


def test_wrapped_function_runs_as_itself_without_traced_values(port) -> None:
    program = port("""
        import torch.fx

        @torch.fx.wrap
        def double(x):
            return 2 * x

        def forward(x):
            return x + double(4)

        traced = torch.fx.symbolic_trace(forward)
    """)
    assert program.double not in called(program.traced)
    assert program.traced(1) == 9


def test_wrapped_function_sees_traced_values_inside_structures(port) -> None:
    program = port("""
        import torch.fx

        @torch.fx.wrap
        def total(values, *, extra):
            return sum(values["list"]) + extra[0]

        traced = torch.fx.symbolic_trace(lambda x: total({"list": [x, x]}, extra=(1,)))
        traced_keyword = torch.fx.symbolic_trace(lambda x: total({"list": [1, 2]}, extra=(x,)))
    """)
    assert called(program.traced) == [program.total]
    assert program.traced(2) == 5
    assert called(program.traced_keyword) == [program.total]
    assert program.traced_keyword(2) == 5


def test_wrap_of_the_builtin_len(port) -> None:
    program = port("""
        import torch.fx

        torch.fx.wrap("len")

        def forward(x):
            return x.reshape(len(x), -1)

        traced = torch.fx.symbolic_trace(forward)
        plain = len([1, 2, 3])
    """)
    assert called(program.traced) == [len]
    assert program.traced(torch.ones(2, 3, 4)).shape == (2, 12)
    assert program.plain == 3
    assert "len" not in vars(program)


@pytest.mark.parametrize(
    ("builtin", "value", "answer"),
    [("sum", [1, 2], 3), ("max", [1, 2], 2), ("int", 2.5, 2), ("float", 2, 2.0), ("sorted", [2, 1], [1, 2])],
)
def test_wrap_of_other_builtins(port, builtin: str, value: object, answer: object) -> None:
    program = port(f"""
        import torch.fx

        torch.fx.wrap("{builtin}")

        def forward(x):
            return {builtin}(x)

        traced = torch.fx.symbolic_trace(forward)
    """)
    assert program.traced(value) == answer
    assert len(called(program.traced)) == 1


def test_wrap_of_a_function_imported_from_another_module(port) -> None:
    program = port("""
        import torch.fx
        from math import hypot
        from statistics import median
        from torch.nn.functional import relu as rectify

        torch.fx.wrap("median")
        torch.fx.wrap("rectify")

        def forward(x, y):
            return median([x, y]) + hypot(x, y)

        traced = torch.fx.symbolic_trace(forward)
    """)
    assert called(program.traced)[:2] == [program.median, program.hypot]
    assert program.traced(3.0, 4.0) == 8.5


def test_wrapped_function_is_a_leaf_from_deep_inside_a_module(port) -> None:
    program = port("""
        import torch
        import torch.fx

        @torch.fx.wrap
        def branchy(x):
            return x if x.sum() > 0 else -x

        class Inner(torch.nn.Module):
            def forward(self, x):
                return branchy(x)

        class Outer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Inner()

            def forward(self, x):
                return self.inner(x) + 1

        traced = torch.fx.symbolic_trace(Outer())
    """)
    assert program.branchy in called(program.traced)
    assert program.traced(torch.tensor([-1.0])).item() == 2.0


def test_leaf_is_kept_when_the_result_is_traced_again(port) -> None:
    program = port(BY_NAME + "\n    again = torch.fx.symbolic_trace(torch.fx.symbolic_trace(traced))\n")
    assert called(program.again) == [program.my_custom_function]
    assert program.again(3, 4) == 25


def test_leaf_is_kept_by_copies_and_pickles(port) -> None:
    program = port(BY_NAME)
    for copied in (copy.deepcopy(program.traced), pickle.loads(pickle.dumps(program.traced))):
        assert called(copied) == [program.my_custom_function]
        assert copied(3, 4) == 25


def test_leaf_is_kept_by_a_transformer(port) -> None:
    program = port(BY_NAME + "\n    transformed = torch.fx.Transformer(traced).transform()\n")
    assert called(program.transformed) == [program.my_custom_function]
    assert program.transformed(3, 4) == 25


def test_wrap_inside_a_function_is_refused(port) -> None:
    program = port("""
        import torch.fx

        def leaf(x):
            return x

        def register():
            torch.fx.wrap("leaf")
    """)
    with pytest.raises(NotImplementedError, match="top level"):
        program.register()


def test_wrap_of_something_else_is_refused(port) -> None:
    with pytest.raises(RuntimeError):
        port("""
            import torch.fx

            torch.fx.wrap(3)
        """)


def test_wrapped_names_are_themselves_after_the_trace(port) -> None:
    program = port("""
        import torch.fx

        @torch.fx.wrap
        def leaf(x):
            return x

        before = leaf
        torch.fx.symbolic_trace(lambda x: leaf(x))
        after = leaf
    """)
    assert program.before is program.after


def test_decorator_with_a_method_calling_the_leaf_with_keywords(port) -> None:
    program = port("""
        import torch
        import torch.fx

        @torch.fx.wrap
        def scale(x, *, by=2):
            return x * by

        class Model(torch.nn.Module):
            def forward(self, x):
                return scale(x, by=3) + scale(x=x)

        traced = torch.fx.symbolic_trace(Model())
    """)
    first, second = (node for node in program.traced.graph.nodes if node.target is program.scale)
    assert first.kwargs == {"by": 3}
    assert list(second.kwargs) == ["x"]
