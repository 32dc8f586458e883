"""Errors of torch and Python about stand-ins become TraceErrors, and refusals that the model catches still count."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.capturing.refusals import refusal_of


class TestErrorsOfOthers:
    @pytest.mark.parametrize(
        ("model", "kind"),
        [
            (lambda x: divmod(x.shape[0], 2), TypeError),
            (lambda x: round(x), TypeError),
            (lambda x: getattr(torch, x), TypeError),
            (lambda x: torch.vmap(torch.sin)(x), ValueError),
            (lambda x: torch.broadcast_shapes(x.shape, (1,)), RuntimeError),
        ],
    )
    def test_the_message_has_the_line_and_what_was_said(self, model, kind) -> None:
        with pytest.raises(fx.TraceError, match=r"(?s)cannot trace .*test_refusals.py:\d+ .*Proxy.*leaf") as caught:
            fx.symbolic_trace(model)
        assert isinstance(caught.value, kind)
        assert caught.value.__cause__ is not None

    def test_the_mode_handed_to_a_built_in_function(self) -> None:
        class Model(nn.Module):
            def forward(self, x):
                return torch.dropout(x, 0.5, self.training)

        program, x = fx.symbolic_trace(Model()), torch.ones(20)
        assert program.code.count("self.training") == 1
        assert (program.train()(x) == 0).any() and torch.equal(program.eval()(x), x)

    def test_errors_of_the_models_own_are_left_alone(self) -> None:
        def model(x):
            raise KeyError(f"no {x}")

        with pytest.raises(KeyError) as caught:
            fx.symbolic_trace(model)
        assert not isinstance(caught.value, fx.TraceError)

    def test_other_errors_are_no_refusals(self) -> None:
        assert refusal_of(ValueError("something else")) is None
        assert refusal_of(fx.TraceError("about a Proxy")) is None


def caught(*kinds):
    def decorate(action):
        def model(x):
            try:
                return x * action(x)
            except kinds:
                return x * 100

        return model

    return decorate


class TestCaughtRefusals:
    @pytest.mark.parametrize("kinds", [(TypeError, ValueError), (Exception,)], ids=["named", "any"])
    @pytest.mark.parametrize(
        "action",
        [
            int,
            float,
            operator.index,
            len,
            lambda x: 2 if x.sum() > 0 else 3,
            lambda x: list(x),
            lambda x: range(x.shape[0]),
        ],
    )
    def test_they_count_all_the_same(self, action, kinds) -> None:
        with pytest.raises(fx.TraceError, match="cannot .* a traced value"):
            fx.symbolic_trace(caught(*kinds)(action))

    def test_a_write_to_the_model(self) -> None:
        class Model(nn.Module):
            def forward(self, x):
                try:
                    self.count = 1
                except Exception:
                    return x * 100
                return x

        with pytest.raises(fx.TraceError, match=r"writes self\.count"):
            fx.symbolic_trace(Model())

    def test_an_argument_that_cannot_be_written_down(self) -> None:
        with pytest.raises(fx.TraceError, match="cannot be part of a traced program"):
            fx.symbolic_trace(caught(NotImplementedError)(lambda x: x.add(object())))

    def test_the_refusal_comes_before_what_it_led_to(self) -> None:
        def model(x):
            found = {}
            try:
                found["n"] = int(x)
            except TypeError:
                pass
            return found["n"]

        with pytest.raises(fx.TraceError, match="make an int of"):
            fx.symbolic_trace(model)

    def test_torch_may_try_whether_a_value_is_a_number(self) -> None:
        program = fx.symbolic_trace(
            lambda x: torch.full((2,), x.size(0)) + torch.zeros(x.size(0), 2) + torch.arange(x.shape[1])
        )
        assert program(torch.ones(2, 2)).shape == (2, 2)
