"""torch.fx's experimental parts with an interface of their own: merge_matmul, meta_tracer, the type checker, the rewriter."""

from __future__ import annotations

import importlib
import operator
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft.errors import GuardError, RunError, ShapeError
from torchgraft.tensor_type import Dyn, TensorType


def both(path: str) -> list[Any]:
    return [importlib.import_module(f"{library}.{path}") for library in ("torch.fx", "torchgraft")]


# ---- merge_matmul ----


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        first = torch.matmul(a, self.weight)
        return first + 1, torch.matmul(b.relu(), self.weight) * 2, torch.matmul(c, c)


def test_products_with_one_right_side_become_one() -> None:
    model, inputs = Products(), (torch.randn(2, 4), torch.randn(3, 4), torch.randn(4, 4))
    kinds = []
    for module in both("experimental.merge_matmul"):
        merged = module.merge_matmul(model)
        torch.testing.assert_close(merged(*inputs), model(*inputs))
        calls = [node for node in merged.graph.nodes if node.op.startswith("call")]
        kinds.append(sorted(str(getattr(node.target, "__name__", node.target)) for node in calls))
    assert kinds[0] == kinds[1] and kinds[0].count("matmul") == 2


def test_products_that_depend_on_each_other_stay() -> None:
    def function(a: Any, weight: Any) -> Any:
        return torch.matmul(torch.matmul(a, weight), weight)

    for module in both("experimental.merge_matmul"):
        assert len(module.merge_matmul(function).graph.find_nodes(op="call_function", target=torch.matmul)) == 2


def test_a_write_between_products_keeps_them_apart() -> None:
    def function(a: Any, b: Any, weight: Any) -> Any:
        first = torch.matmul(a, weight)
        weight.mul_(2)
        return first, torch.matmul(b, weight)

    program = torchgraft.experimental.merge_matmul.merge_matmul(function)
    inputs = torch.ones(1, 2), torch.ones(1, 2), torch.ones(2, 2)
    torch.testing.assert_close(program(*[x.clone() for x in inputs]), function(*[x.clone() for x in inputs]))


def test_a_batch_on_the_right_is_refused_and_not_mixed_up() -> None:
    def function(a: Any, b: Any, weight: Any) -> Any:
        return torch.matmul(a, weight), torch.matmul(b, weight)

    program = torchgraft.experimental.merge_matmul.merge_matmul(function)
    with pytest.raises(RunError, match="merge_matmul is for matrices"):
        program(torch.randn(1, 2, 3), torch.randn(1, 2, 3), torch.randn(2, 3, 4))


# ---- meta_tracer ----


class AsksForSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.activation(x)).abs()
        batch, width = y.shape
        for _ in range(batch):
            y = y + 1
        return y.view(batch, width // 2, 2) + torch.zeros(2, device=y.device)


def test_sizes_are_numbers_while_tracing() -> None:
    model, x = AsksForSizes(), torch.randn(3, 4)
    counts = []
    for module in both("experimental.meta_tracer"):
        program = module.symbolic_trace(model, {"x": torch.ones(3, 4, device="meta")})
        torch.testing.assert_close(program(x), model(x))
        counts.append(len(program.graph.find_nodes(op="call_function", target=operator.add)))
    assert counts == [4, 4]


def test_layers_that_torch_fx_has_no_rule_for() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.conv = nn.Linear(4, 6), nn.Conv1d(3, 5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(self.layer(x)) @ self.layer.weight[:4, :]
            return y.sum() + y.shape[1] * y.size(-1)

    model, x = Layers(), torch.randn(2, 3, 4)
    program = torchgraft.experimental.meta_tracer.symbolic_trace(model, {"x": x.to("meta")})
    torch.testing.assert_close(program(x), model(x))
    assert not program.graph.find_nodes(op="call_method", target="size")


def test_a_program_traced_for_one_size_says_so() -> None:
    program = torchgraft.experimental.meta_tracer.symbolic_trace(AsksForSizes(), {"x": torch.ones(3, 4, device="meta")})
    with pytest.raises(GuardError, match="x.shape"):
        program(torch.randn(2, 4))


def test_without_a_question_nothing_is_checked() -> None:
    program = torchgraft.experimental.meta_tracer.symbolic_trace(
        lambda x: x.relu() + 1, {"x": torch.ones(2, device="meta")}
    )
    assert program(torch.ones(5)).shape == (5,) and not program.guards
    assert program.graph._tracer_extras["meta_args"]["x"].shape == (2,)


def test_a_module_made_in_forward_is_put_into_the_model() -> None:
    class Makes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.ReLU()(x)

    for module in both("experimental.meta_tracer"):
        program = module.symbolic_trace(Makes(), {"x": torch.ones(2, device="meta")})
        assert [node.target for node in program.graph.nodes if node.op == "call_module"] == ["relu_0"]


def test_meta_args_must_be_a_dict() -> None:
    for module in both("experimental.meta_tracer"):
        with pytest.raises((AssertionError, TypeError), match="Expected dict for meta_args"):
            module.MetaTracer().trace(lambda x: x, [torch.ones(1)])


# ---- graph_gradual_typechecker ----


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.linear = nn.Linear(8 * 15 * 15, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pool(torch.relu(self.norm(self.conv(x))))
        return self.linear(torch.flatten(y, 1))


def typed(library: Any, *dims: Any) -> Any:
    kinds = importlib.import_module(f"{library.__name__}.tensor_type")
    program = library.symbolic_trace(Typed())
    sizes = [kinds.Dyn if size is None else size for size in dims]
    next(iter(program.graph.nodes)).type = kinds.TensorType(tuple(sizes))
    return program


def test_every_node_gets_its_type() -> None:
    from torchgraft.experimental.graph_gradual_typechecker import GraphTypeChecker

    program = typed(torchgraft, None, 3, 32, 32)
    assert GraphTypeChecker({}, program).type_check() is True
    types = {node.name: node.type for node in program.graph.nodes}
    assert types["pool"] == TensorType((Dyn, 8, 15, 15)) and types["linear"] == TensorType((Dyn, 10))
    assert GraphTypeChecker({}, program).type_check() is True, "a second time, with the types it gave"
    program(torch.randn(2, 3, 32, 32))


def test_a_wrong_type_is_a_type_error() -> None:
    from torchgraft.experimental.graph_gradual_typechecker import GraphTypeChecker

    with pytest.raises(TypeError):
        GraphTypeChecker({}, typed(torchgraft, 1, 4, 32, 32)).type_check()


@pytest.mark.parametrize(
    ("one", "two"),
    [((1, 2, 3), (2, 1)), ((), (4,)), ((5, 1), (1, 7)), ((2, 3), (2, 3)), ((None, 1), (4, None)), ((2,), (3,))],
)
def test_types_are_broadcast_as_in_torch_fx(one: Any, two: Any) -> None:
    texts = []
    for library in ("torch.fx", "torchgraft"):
        kinds = importlib.import_module(f"{library}.tensor_type")
        checker = importlib.import_module(f"{library}.experimental.graph_gradual_typechecker")
        made = [kinds.TensorType(tuple(kinds.Dyn if d is None else d for d in dims)) for dims in (one, two)]
        texts.append(str(checker.broadcast_types(*made)))
        assert checker.broadcast_types(kinds.Dyn, made[0]) == (kinds.Dyn, made[0])
        with pytest.raises(TypeError, match="Cannot broadcast types"):
            checker.broadcast_types(made[0], 5)
        assert len(checker.expand_to_tensor_dim(kinds.Dyn, 3).__args__) == 3
        with pytest.raises(TypeError, match="It should have rank 9"):
            checker.expand_to_tensor_dim(made[0], 9)
    assert texts[0] == texts[1]


def test_the_error_is_ours_too() -> None:
    from torchgraft.experimental.graph_gradual_typechecker import expand_to_tensor_dim

    with pytest.raises(ShapeError, match="Cannot match the type 5"):
        expand_to_tensor_dim(5, 1)


# ---- rewriter ----


def annotate(value: Any, kind: Any) -> Any:
    return value if kind is None else value + 0


def test_assertions_and_annotations_become_calls() -> None:
    def asserting(x: Any, limit: float = 100.0, *, scale: int = 2) -> Any:
        assert x.sum() < limit, "too large"
        y: int = x * scale
        return y

    names = []
    for module, library in zip(both("experimental.rewriter"), (torch.fx, torchgraft), strict=True):
        function = module.AST_Rewriter().rewrite(asserting)
        assert function(torch.ones(2)).tolist() == [2.0, 2.0]
        with pytest.raises(AssertionError, match="too large"):
            function(torch.full((2,), 100.0))
        program = library.symbolic_trace(function, concrete_args={"limit": 100.0, "scale": 2})  # type: ignore[attr-defined]
        names.append([node.name for node in program.graph.nodes])
    assert names[0] == names[1]


def test_closures_methods_and_super_are_kept() -> None:
    from torchgraft.experimental.rewriter import AST_Rewriter

    factor, offset = 3, 4

    def function(x: Any) -> Any:
        assert x is not None
        return x * factor + offset

    assert AST_Rewriter().rewrite(function)(2) == 10

    class Base(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1

    class Child(Base):
        def forward(self, x: Any) -> Any:
            assert x.sum() > 0, "positive"
            return super().forward(x) * factor

    child = Child()
    method: Any = child.forward
    rewritten = AST_Rewriter().rewrite(method)
    assert rewritten(torch.ones(1)).item() == 6
    with pytest.raises(AssertionError, match="positive"):
        rewritten(-torch.ones(1))


def test_a_function_without_source_is_refused() -> None:
    from torchgraft.experimental.rewriter import AST_Rewriter

    names: dict[str, Any] = {}
    exec("def function(x): return x", names)
    with pytest.raises(torchgraft.TraceError, match="its source cannot be read"):
        AST_Rewriter().rewrite(names["function"])
