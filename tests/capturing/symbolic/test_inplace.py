"""In-place operators: plain where nobody can tell the difference, in place everywhere else.
The program runs beside the eager function; results, types and the caller's tensors must agree.
"""

import operator

import pytest
import torch
from torch import nn

import torchgraft as fx
from tests.capturing.comparison import trace_like_eager


def matrix() -> tuple[torch.Tensor]:
    return (torch.arange(4.0).reshape(2, 2),)


def two() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(4.0).reshape(2, 2), torch.full((2, 2), 3.0)


def targets(program: fx.GraphModule) -> list:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x):
        identity = x
        out = self.norm(self.conv(x))
        out += identity
        return torch.relu(out)


class TestPlainForm:
    def test_a_residual_connection_is_an_addition(self) -> None:
        program = fx.symbolic_trace(nn.Sequential(nn.Conv2d(2, 2, 1), Block()))
        assert targets(program) == [operator.add, torch.relu]

    def test_a_block_alone_gives_what_eager_gives(self) -> None:
        trace_like_eager(Block().eval(), lambda: (torch.ones(1, 2, 1, 1),))

    @pytest.mark.parametrize("name", ["iadd", "isub", "imul", "ifloordiv", "imod", "ipow"])
    def test_every_operator_on_a_new_value(self, name: str) -> None:
        in_place = getattr(operator, name)
        program = trace_like_eager(lambda x: in_place(x + 1, 3), matrix)
        assert targets(program) == [operator.add, getattr(operator, name[1:])]

    @pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"])
    def test_every_operator_on_two_tensors(self, name: str) -> None:
        in_place = getattr(operator, name)
        trace_like_eager(lambda x, y: in_place(x + 1, y), two)

    @pytest.mark.parametrize("name", ["ilshift", "irshift", "iand", "ior", "ixor"])
    def test_operators_on_bits(self, name: str) -> None:
        in_place = getattr(operator, name)
        program = trace_like_eager(lambda x: in_place(x + 1, 1), lambda: (torch.arange(4),))
        assert not any(target is in_place for target in targets(program))

    def test_names_follow(self) -> None:
        def forward(x):
            y = x * 2
            y += 1
            y -= 2
            return y

        assert [node.name for node in fx.symbolic_trace(forward).graph.nodes] == ["x", "mul", "add", "sub", "output"]

    def test_numbers_and_sizes(self) -> None:
        def forward(x):
            size = x.shape[0]
            size *= 2
            size += 1
            return x + size

        trace_like_eager(forward, matrix)


class TestInPlace:
    def test_an_input_is_changed_for_the_caller(self) -> None:
        def forward(x):
            x += 1
            return x * 2

        program = trace_like_eager(forward, matrix)
        assert operator.iadd in targets(program)

    VIEWS = {
        "view": lambda x: x.view(-1),
        "reshape": lambda x: x.reshape(4),
        "transpose": lambda x: x.t(),
        "slice": lambda x: x[0],
        "expand": lambda x: x[:1].expand(1, 2),
        "contiguous": lambda x: x.contiguous(),
        "to": lambda x: x.to(torch.float32),
        "float": lambda x: x.float(),
        "detach": lambda x: x.detach(),
        "data": lambda x: x.data,
        "flatten": lambda x: torch.flatten(x),
        "squeeze": lambda x: torch.squeeze(x),
        "unbind": lambda x: x.unbind(0)[0],
        "chunk": lambda x: torch.chunk(x, 2)[0],
        "real": lambda x: torch.real(x),
        "positive": lambda x: +x,
        "dropout in evaluation": lambda x: nn.functional.dropout(x, training=False),
        "torch.dropout": lambda x: torch.dropout(x, 0.5, False),
        "in place": lambda x: x.mul_(1),
        "relu_": lambda x: torch.relu_(x),
        "identity": lambda x: nn.functional.relu(x, inplace=True),
        "as_strided": lambda x: x.as_strided((2,), (1,)),
        "broadcast": lambda x: torch.broadcast_tensors(x, x)[0],
    }

    @pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
    def test_through_an_alias_of_the_input(self, view) -> None:
        def forward(x):
            y = view(x)
            y += 1
            return x * 2

        trace_like_eager(forward, matrix)

    HIDDEN = {
        "einsum": lambda x: torch.einsum("ij->ji", x),
        "type_as": lambda x: x.type_as(x),
        "atleast_1d": lambda x: torch.atleast_1d(x),
        "conj_physical": lambda x: torch.conj_physical(x),
        "cartesian_prod": lambda x: torch.cartesian_prod(x[0]),
        "sum_to_size": lambda x: x.sum_to_size(2, 2),
        "to_dense": lambda x: x.to_dense(),
    }

    @pytest.mark.parametrize("view", HIDDEN.values(), ids=HIDDEN)
    def test_through_an_alias_that_no_schema_tells(self, view) -> None:
        def forward(x):
            y = view(x)
            y += 1
            return x * 2

        trace_like_eager(forward, matrix)

    MODULES = {
        "identity": nn.Identity(),
        "flatten": nn.Flatten(0),
        "dropout": nn.Dropout().eval(),
        "relu": nn.ReLU(inplace=True),
        "sequential": nn.Sequential(nn.Identity()),
    }

    @pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
    def test_through_a_module_that_hands_its_input_on(self, module: nn.Module) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.module = module

            def forward(self, x):
                y = self.module(x)
                y += 1
                return x * 2

        trace_like_eager(Model(), matrix)

    def test_a_second_name_of_a_new_value(self) -> None:
        def forward(x):
            y = x * 2
            z = y
            z += 1
            return y, z

        program = trace_like_eager(forward, matrix)
        assert operator.iadd in targets(program)

    def test_a_view_of_a_new_value(self) -> None:
        def forward(x):
            y = x * 2
            view = y[0]
            y += 1
            return view

        trace_like_eager(forward, matrix)

    def test_an_element_of_a_new_value(self) -> None:
        def forward(x):
            y = x * 2
            y[0] += 1
            return y

        trace_like_eager(forward, matrix)

    def test_a_value_used_before(self) -> None:
        def forward(x):
            y = x * 2
            z = y + 1
            y += 1
            return y * z

        trace_like_eager(forward, matrix)

    def test_a_buffer(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("total", torch.zeros(2, 2))

            def forward(self, x):
                total = self.total
                total += x
                return total * 2

        trace_like_eager(Model(), matrix)

    def test_written_to_an_out_argument(self) -> None:
        def forward(x, y):
            z = torch.add(x, 1, out=y)
            z += 1
            return y * 2

        trace_like_eager(forward, two)


class TestTypes:
    """`y += z` keeps the type and shape of y; `y + z` need not."""

    def test_a_narrow_value_stays_narrow(self) -> None:
        def forward(x, y):
            z = x * 2
            z += y
            return z

        trace_like_eager(forward, lambda: (torch.ones(2, dtype=torch.float16), torch.ones(2)))

    def test_a_residual_connection_under_autocast_stays_narrow(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(2, 2)

            def forward(self, x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = self.linear(x)
                out += x
                return out

        trace_like_eager(Block(), matrix)

    @pytest.mark.parametrize(
        "inputs",
        [
            lambda: (torch.ones(2, dtype=torch.int64), torch.ones(2)),
            lambda: (torch.ones(2), torch.ones(3, 2)),
        ],
        ids=["type", "shape"],
    )
    def test_what_eager_refuses_is_refused(self, inputs) -> None:
        def forward(x, y):
            z = x * 2
            z += y
            return z

        program = fx.symbolic_trace(forward)
        with pytest.raises(RuntimeError):
            forward(*inputs())
        with pytest.raises(RuntimeError):
            program(*inputs())

    def test_a_number_that_eager_refuses_is_refused(self) -> None:
        def forward(x):
            y = x * 2
            y += 0.5
            return y

        with pytest.raises(RuntimeError):
            forward(torch.ones(2, dtype=torch.int64))
        with pytest.raises(RuntimeError):
            fx.symbolic_trace(forward)(torch.ones(2, dtype=torch.int64))

    def test_a_residual_connection_of_a_program_run_under_autocast_stays_narrow(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(2, 2)

            def forward(self, x):
                out = self.linear(x)
                out += x
                return out

        model = Block()
        program = fx.symbolic_trace(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert program(*matrix()).dtype is model(*matrix()).dtype is torch.bfloat16

    def test_a_quotient_that_eager_refuses_is_refused(self) -> None:
        def forward(x):
            y = x * 2
            y /= 2
            return y

        with pytest.raises(RuntimeError):
            fx.symbolic_trace(forward)(torch.ones(2, dtype=torch.int64))

    def test_a_program_run_under_autocast_keeps_the_type(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                # Under autocast the convolution gives narrow values and this pooling wide ones.
                self.first, self.second, self.pool = nn.Conv3d(1, 1, 1), nn.Conv3d(1, 1, 1), nn.AvgPool3d(1)

            def forward(self, x):
                y = self.second(x)
                y += self.pool(self.first(x))
                return y

        model = Model()
        program = fx.symbolic_trace(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.ones(1, 1, 2, 2, 2)
            assert program(x).dtype is model(x).dtype


def test_a_hook_that_keeps_the_result_sees_the_change() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            y = self.linear(x)
            y += 1
            return y

    model, kept = Model(), []
    model.linear.register_forward_hook(lambda module, inputs, output: kept.append(output))
    program = fx.symbolic_trace(model)
    with torch.no_grad():
        model(*matrix()), program(*matrix())
    assert torch.equal(kept[0], kept[1])
