"""What modules do while a model is traced: calls, attributes, `self.training`, hooks.
How the patches are put in place is in test_active.py.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgraft as fx
from torchgraft.ir.guards import check_training


class Dropping(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x):
        return F.dropout(x, self.p, self.training)


class Branching(nn.Module):
    def forward(self, x):
        if self.training:
            return x + 1
        return x - 1


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def ones() -> torch.Tensor:
    return torch.ones(1000)


class TestTrainingHandedOn:
    @pytest.mark.parametrize("wrap", [lambda m: m, Holder, lambda m: Holder(Holder(m))], ids=["root", "inside", "deep"])
    @pytest.mark.parametrize("captured_in", [True, False])
    def test_the_program_follows_the_mode(self, wrap, captured_in: bool) -> None:
        program = fx.symbolic_trace(wrap(Dropping()).train(captured_in))
        for training in (True, False, True):
            program.train(training)
            assert bool((program(ones()) == 0).any()) is training

    def test_the_mode_of_one_submodule_alone(self) -> None:
        program = fx.symbolic_trace(Holder(Dropping()))
        program.inner.eval()
        assert not (program(ones()) == 0).any()
        assert program.training

    def test_the_model_itself_may_be_in_another_mode(self) -> None:
        model = Holder(Dropping())
        program = fx.symbolic_trace(model)
        model.eval()
        assert (program(ones()) == 0).any()

    def test_it_is_fetched_as_an_attribute(self) -> None:
        graph = fx.symbolic_trace(Holder(Dropping())).graph
        assert [node.target for node in graph.find_nodes(op="get_attr")] == ["inner.training"]

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_follow_their_own_mode(self, duplicate) -> None:
        program = duplicate(fx.symbolic_trace(Holder(Dropping()))).eval()
        assert not (program(ones()) == 0).any()

    def test_interpreters_follow_it_too(self) -> None:
        program = fx.symbolic_trace(Dropping()).eval()
        assert not (fx.Interpreter(program).run(ones()) == 0).any()

    def test_as_an_operand(self) -> None:
        class Scaling(nn.Module):
            def forward(self, x):
                return x * self.training

        program = fx.symbolic_trace(Scaling())
        assert program(3) == 3
        assert program.eval()(3) == 0


class TestTrainingDecides:
    USES = {
        "if": lambda self, x: x + 1 if self.training else x - 1,
        "not": lambda self, x: x - 1 if not self.training else x + 1,
        "equal": lambda self, x: x + 1 if self.training == True else x - 1,  # noqa: E712
        "and": lambda self, x: x + 1 if self.training and True else x - 1,
        "int": lambda self, x: x - 1 + 2 * int(self.training),
        "key": lambda self, x: x + {True: 1, False: -1}[self.training],
        "index": lambda self, x: x + [-1, 1][self.training],
        "bool": lambda self, x: x + (1 if bool(self.training) else -1),
    }

    @staticmethod
    def model(use) -> nn.Module:
        return type("Model", (nn.Module,), {"forward": use})()

    @pytest.mark.parametrize("use", USES.values(), ids=USES)
    @pytest.mark.parametrize("mode", [True, False])
    def test_the_program_is_that_of_the_mode_and_says_so(self, use, mode: bool) -> None:
        program = fx.symbolic_trace(self.model(use).train(mode))
        assert program(1) == (2 if mode else 0)
        program.train(not mode)
        with pytest.raises(fx.GuardError, match="self.training"):
            program(1)
        program.train(mode)
        assert program(1) == (2 if mode else 0)

    def test_identity_is_guarded_or_refused(self) -> None:
        model = self.model(lambda self, x: x + 1 if self.training is True else x - 1)
        try:
            program = fx.symbolic_trace(model)
        except fx.TraceError:
            return
        assert program(1) == 2

    def test_arithmetic(self) -> None:
        program = fx.symbolic_trace(self.model(lambda self, x: x + 0.5 * self.training))
        assert program(1) == 1.5

    def test_setting_the_mode_that_is_there(self) -> None:
        def forward(self, x):
            self.train(self.training)
            return x + 1

        assert fx.symbolic_trace(self.model(forward))(1) == 2

    def test_the_message_names_the_line_and_the_remedy(self) -> None:
        program = fx.symbolic_trace(Branching()).eval()
        with pytest.raises(fx.GuardError) as caught:
            program(1)
        message = str(caught.value)
        assert f'{__file__}:{Branching.forward.__code__.co_firstlineno + 1} "if self.training:"' in message
        assert "capture the model again in evaluation mode" in message

    def test_guards_of_submodules_look_at_the_submodule(self) -> None:
        program = fx.symbolic_trace(Holder(Branching()))
        program.inner.eval()
        with pytest.raises(fx.GuardError):
            program(1)

    def test_one_guard_for_each_module(self) -> None:
        class Twice(nn.Module):
            def forward(self, x):
                y = x + 1 if self.training else x
                return y + 1 if self.training else y

        program = fx.symbolic_trace(Twice())
        assert len(program.graph.find_nodes(op="call_function", target=check_training)) == 1

    def test_guards_are_no_dead_code(self) -> None:
        program = fx.symbolic_trace(Branching())
        program.graph.eliminate_dead_code()
        program.eval()
        with pytest.raises(fx.GuardError):
            program(1)

    def test_it_is_a_plain_flag_outside_of_a_trace(self) -> None:
        fx.symbolic_trace(Branching())
        assert Branching().training is True


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2


class TestHooks:
    @pytest.mark.parametrize(
        "register",
        [
            lambda m: m.register_forward_hook(lambda module, inputs, output: output + 100),
            lambda m: m.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 50,)),
            lambda m: m.register_forward_hook(lambda module, inputs, kwargs, output: output + 100, with_kwargs=True),
        ],
        ids=["forward", "before", "with keywords"],
    )
    def test_a_submodule_with_hooks_is_kept_whole(self, register) -> None:
        model = Holder(Doubling())
        register(model.inner)
        program = fx.symbolic_trace(model)
        assert [node.target for node in program.graph.find_nodes(op="call_module")] == ["inner"]
        assert torch.equal(program(torch.ones(1)), model(torch.ones(1)))
        assert program(torch.ones(1)) == 102

    def test_backward_hooks_too(self) -> None:
        model = Holder(Doubling())
        model.inner.register_full_backward_hook(lambda module, incoming, outgoing: (incoming[0] * 10,))
        x = torch.ones(1, requires_grad=True)
        fx.symbolic_trace(model)(x).sum().backward()
        assert x.grad == 20

    def test_hooks_do_not_run_while_tracing(self) -> None:
        model, seen = Holder(Doubling()), []
        model.inner.register_forward_hook(lambda module, inputs, output: seen.append(1))
        fx.symbolic_trace(model)
        assert seen == []

    @pytest.mark.parametrize(
        "register",
        [
            lambda m: m.register_forward_hook(lambda *args: None),
            lambda m: m.register_forward_pre_hook(lambda *args: None),
            lambda m: m.register_full_backward_hook(lambda *args: None),
        ],
    )
    def test_hooks_on_the_root_are_refused_with_the_remedy(self, register) -> None:
        model = Doubling()
        register(model)
        with pytest.raises(fx.TraceError, match="hooks are registered on it\n  remove them"):
            fx.symbolic_trace(model)


class TestForwardOnTheInstance:
    def test_of_the_root(self) -> None:
        model = Doubling()
        model.forward = lambda x: x * 3
        assert fx.symbolic_trace(model)(2) == model(2) == 6

    def test_of_the_root_using_itself(self) -> None:
        model = Holder(nn.Linear(2, 2))
        model.forward = lambda x: model.inner(x) * 2
        program = fx.symbolic_trace(model)
        assert program.inner is model.inner
        assert torch.equal(program(torch.ones(2)), model(torch.ones(2)))

    def test_of_a_submodule(self) -> None:
        model = Holder(Doubling())
        model.inner.forward = lambda x: x * 3
        assert fx.symbolic_trace(model)(2) == model(2) == 6


class TestCalls:
    def test_a_call_overridden_by_the_class(self) -> None:
        class Calling(nn.Module):
            def __call__(self, x):
                return super().__call__(x) + 1

            def forward(self, x):
                return x * 2

        assert fx.symbolic_trace(Holder(Calling()))(3) == 7

    def test_forward_called_directly(self) -> None:
        class Direct(Holder):
            def forward(self, x):
                return self.inner.forward(x)

        assert fx.symbolic_trace(Direct(Doubling()))(3) == 6

    def test_getattr_defined_by_the_class(self) -> None:
        class Answering(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Doubling()

            def __getattr__(self, name):
                return 7 if name == "answer" else super().__getattr__(name)

            def forward(self, x):
                return self.inner(x) + self.answer

        assert fx.symbolic_trace(Answering())(1) == 9
