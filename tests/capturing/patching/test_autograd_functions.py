"""Custom autograd functions in a traced model are one node each, whatever name `apply` has, and keep their own backward."""

import copy
import pickle

import pytest
import torch

import torchgraft as fx


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return x.round() * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 10, None


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, scale=2.0):
        return x.round() * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0].exp())

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 10 + 0 * ctx.saved_tensors[0], None


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return first * 10


class Composed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Straight.forward(ctx, x, 2.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


straight, with_setup, two_results, composed = Straight.apply, WithSetup.apply, TwoResults.apply, Composed.apply


class TestAutogradFunctions:
    def program(self) -> fx.GraphModule:
        return fx.symbolic_trace(lambda x: Straight.apply(x, 2.0) + 1)

    def gradient(self, program) -> list[float]:
        x = torch.tensor([0.7], requires_grad=True)
        program(x).sum().backward()
        return x.grad.tolist()

    def test_the_backward_is_its_own(self) -> None:
        program = self.program()
        assert program(torch.tensor([0.7])) == 3
        assert self.gradient(program) == [10]

    def test_it_is_one_node_with_its_own_apply(self) -> None:
        node = list(self.program().graph.nodes)[1]
        assert (node.name, node.op, node.target) == ("straight", "call_function", Straight.apply)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_it_survives_copies(self, duplicate) -> None:
        assert self.gradient(duplicate(self.program())) == [10]

    def test_it_survives_another_trace(self) -> None:
        assert self.gradient(fx.symbolic_trace(self.program())) == [10]

    def test_two_functions_are_told_apart(self) -> None:
        class Other(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, scale):
                return x * scale

            @staticmethod
            def backward(ctx, gradient):
                return gradient * 100, None

        program = fx.symbolic_trace(lambda x: Straight.apply(x, 2.0) + Other.apply(x, 1.0))
        assert self.gradient(program) == [110]

    def test_without_traced_values_it_runs(self) -> None:
        constant = torch.tensor([1.0])

        def forward(x):
            return x + 1

        program = fx.symbolic_trace(forward)
        assert Straight.apply(constant, 2.0) == 2
        assert program(1) == 2

    @pytest.mark.parametrize(
        ("forward", "expected"),
        [
            (lambda x: straight(x, 2.0), 10),
            (lambda x: with_setup(x), 10),
            (lambda x: with_setup(x, 3.0), 10),
            (lambda x: with_setup(straight(x, 1.0)), 100),
            (lambda x: two_results(x)[0], 10),
            (lambda x: two_results(x)[0] + two_results(x)[1], 10),
            (lambda x: composed(x), 7),
            (lambda x: straight(x * 2, scale := 2.0) * scale, 40),
        ],
    )
    def test_the_backward_is_its_own_under_another_name(self, forward, expected) -> None:
        program = fx.symbolic_trace(forward)
        assert self.gradient(forward) == self.gradient(program) == [expected]
        assert torch.equal(program(torch.tensor([0.7])), forward(torch.tensor([0.7])))

    def test_what_it_saves_is_no_part_of_the_program(self) -> None:
        program = fx.symbolic_trace(lambda x: with_setup(x))
        assert [node.name for node in program.graph.nodes] == ["x", "with_setup", "output"]

    def test_a_forward_called_by_hand_is_traced_through(self) -> None:
        program = fx.symbolic_trace(lambda x: straight(x, 2.0) + Straight.forward(None, x, 2.0))
        assert [node.name for node in program.graph.nodes] == ["x", "straight", "round_1", "mul", "add", "output"]

    def test_under_another_name_it_runs_where_nobody_traces(self) -> None:
        fx.symbolic_trace(lambda x: straight(x, 2.0))
        assert straight(torch.tensor([1.0]), 2.0) == with_setup(torch.tensor([1.0])) == 2

    def test_real_tensors_under_another_name(self) -> None:
        weight = torch.tensor([1.6])
        program = fx.symbolic_trace(lambda x: x + straight(torch.ones(1), 2.0) + with_setup(weight))
        assert program(torch.tensor([1.0])) == 7
