"""Calls on real tensors while tracing: buffers, constants, factories, random draws, and writes into any of them.
Every program runs several times beside the eager model, because state carried from call to call is the trap here.
"""

import gc

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgraft as fx
from tests.capturing.comparison import names, trace_like_eager
from torchgraft.capturing.symbolic.recording import is_random


class Stateful(nn.Module):
    """A model with a buffer, a parameter and a plain tensor; `function(self, x)` is its forward."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("buffer", torch.tensor([1.0, 2.0]))
        self.weight = nn.Parameter(torch.tensor([3.0, 4.0]))
        self.plain = torch.tensor([5.0, 6.0])

    def forward(self, x):
        return self.function(self, x)


def x() -> tuple[torch.Tensor]:
    return (torch.arange(6.0).reshape(3, 2),)


def vector() -> tuple[torch.Tensor]:
    return (torch.arange(3.0),)


def table(**programs):
    return pytest.mark.parametrize("function", programs.values(), ids=programs)


class TestBuffers:
    @table(
        used=lambda self, x: x + self.buffer,
        method=lambda self, x: self.buffer.exp() + x,
        function=lambda self, x: torch.exp(self.buffer) + x,
        index=lambda self, x: self.buffer[1] * x,
        traced_index=lambda self, x: self.buffer[x.shape[1] - 1] * x,
        slice=lambda self, x: self.buffer[: x.shape[1]] * x,
        mask=lambda self, x: self.buffer[self.buffer > 1].sum() * x,
        split=lambda self, x: self.buffer.split(1)[0] + x,
        named_result=lambda self, x: self.buffer.max(0).values + x,
        like=lambda self, x: torch.zeros_like(self.buffer) + x,
        new=lambda self, x: self.buffer.new_zeros(2) + x,
        property=lambda self, x: self.buffer[None].T + x[0],
        data=lambda self, x: self.buffer.data + x,
        detached=lambda self, x: self.buffer.detach().clone() + x,
        size=lambda self, x: x * self.buffer.numel() * self.buffer.shape[0] * self.buffer.size(0) * len(self.buffer),
        iterated=lambda self, x: sum(x * value for value in self.buffer),
        plain=lambda self, x: x + self.plain,
        parameter=lambda self, x: x + self.weight.detach() + self.weight.data,
        nonzero=lambda self, x: self.buffer.nonzero().sum() + x,
    )
    def test_reading(self, function) -> None:
        trace_like_eager(Stateful(function), x)

    @table(
        method=lambda self, x: (self.buffer.add_(1), self.buffer + x)[1],
        from_input=lambda self, x: (self.buffer.copy_(x[0]), self.buffer + x)[1],
        running_mean=lambda self, x: (self.buffer.mul_(0.9).add_(x.mean(0), alpha=0.1), x - self.buffer)[1],
        traced_store=lambda self, x: (self.buffer.__setitem__(0, x[0, 1]), self.buffer + x)[1],
        view=lambda self, x: (self.buffer[1:].add_(x[0, 1]), self.buffer + x)[1],
        out=lambda self, x: (torch.add(self.buffer, 1, out=self.buffer), self.buffer + x)[1],
        out_from_input=lambda self, x: (torch.add(x[0], 1, out=self.buffer), self.buffer + x)[1],
        fill=lambda self, x: (self.buffer.fill_(7.0), self.buffer + x)[1],
        last_thing=lambda self, x: (x + self.buffer, self.buffer.add_(1))[0],
    )
    def test_writing_happens_when_the_program_runs(self, function) -> None:
        model = Stateful(function)
        before = model.buffer.clone()
        fx.symbolic_trace(model)
        assert torch.equal(model.buffer, before), "tracing writes nothing"
        trace_like_eager(model, x)

    def test_storing_a_constant_into_a_buffer(self) -> None:
        def function(self, x):
            self.buffer[0] = 5.0
            return self.buffer + x

        trace_like_eager(Stateful(function), x)

    @table(
        item=lambda self, x: x * 2 if self.buffer.sum() > 0 else x,
        to_list=lambda self, x: x * self.buffer.tolist()[0],
        number=lambda self, x: x * float(self.buffer[0]),
        equal=lambda self, x: x if torch.equal(self.buffer, self.buffer) else -x,
        numpy=lambda self, x: x * self.buffer.numpy()[0],
        plain=lambda self, x: x * self.plain.tolist()[0],
    )
    def test_reading_values_into_python_is_refused_with_the_line(self, function) -> None:
        with pytest.raises(fx.TraceError) as caught:
            fx.symbolic_trace(Stateful(function))
        message = str(caught.value)
        assert __file__ in message
        assert "lambda self, x:" in message
        assert "leaf" in message

    def test_item_of_a_buffer_stays_a_question_for_the_run(self) -> None:
        model = Stateful(lambda self, x: x * self.buffer.sum().item())
        program = trace_like_eager(model, x)
        program.buffer.zero_()
        assert program(*x()).abs().sum() == 0

    @table(
        expand=lambda self, x: self.buffer.expand(x.shape[0], -1) + x,
        new_zeros=lambda self, x: self.buffer.new_zeros(x.shape[0], 2) + x,
        constant=lambda self, x: torch.ones(2).expand(x.size(0), 2) + x,
    )
    def test_traced_sizes_given_to_methods_of_real_tensors(self, function) -> None:
        trace_like_eager(Stateful(function), x)

    @pytest.mark.xfail(strict=True, reason="attributes of buffers are read once, while tracing")
    def test_the_type_of_a_buffer_is_asked_for_when_the_program_runs(self) -> None:
        program = fx.symbolic_trace(Stateful(lambda self, x: x.to(self.buffer.dtype)))
        assert program.double()(*x()).dtype is torch.float64

    def test_augmented_assignment_to_a_buffer(self) -> None:
        def function(self, x):
            self.buffer += 1
            return x + self.buffer

        trace_like_eager(Stateful(function), x)


class TestTensorsFromOutside:
    def test_a_closure_tensor_is_fetched_not_baked(self) -> None:
        constant = torch.ones(2)
        program = fx.symbolic_trace(lambda x: x + constant)
        assert names(program) == ["x", "_tensor_constant0", "add", "output"]
        constant.add_(1)
        assert torch.equal(program(torch.zeros(2)), torch.full((2,), 2.0))

    def test_the_same_tensor_twice_has_one_name(self) -> None:
        constant = torch.ones(2)
        program = fx.symbolic_trace(lambda x: x + constant - constant)
        assert {node.target for node in program.graph.nodes if node.op == "get_attr"} == {"_tensor_constant0"}

    def test_values_of_a_closure_tensor_are_refused(self) -> None:
        constant = torch.ones(2)
        with pytest.raises(fx.TraceError, match="of outside the traced function"):
            fx.symbolic_trace(lambda x: x * constant.tolist()[0])

    def test_writing_into_a_closure_tensor_happens_when_the_program_runs(self) -> None:
        constant = torch.zeros(2)

        def forward(x):
            constant.add_(x)
            return constant * 1

        program = fx.symbolic_trace(forward)
        assert torch.equal(constant, torch.zeros(2))
        assert [program(torch.ones(2))[0].item() for _ in range(2)] == [1, 2]

    def test_a_foreign_parameter_is_refused(self) -> None:
        weight = nn.Parameter(torch.ones(2))
        with pytest.raises(NameError, match="not a member of this module"):
            fx.symbolic_trace(lambda x: x + weight)

    @table(
        returned=lambda x: (torch.Tensor([0.0, 1.0, 2.0]), x),
        a_view=lambda x: (t := torch.Tensor([0.0, 1.0, 2.0]), t[1:].add_(x[1:]), t + t)[2],
        by_item=lambda x: (t := torch.Tensor([0.0, 1.0, 2.0]), t.__setitem__(0, x[0]), t * t)[2],
        twice=lambda x: (t := torch.Tensor([0.0, 1.0, 2.0]), t.add_(x), t.mul_(t), t + 1)[3],
        from_numpy=lambda x: torch.from_numpy(numpy.zeros(3, dtype=numpy.float32)).add_(x).clone(),
        old_constructor=lambda x: torch.Tensor([0.0, 0.0, 0.0]).add_(x).clone(),
        old_type=lambda x: torch.FloatTensor([0.0, 0.0, 0.0]).add_(x).clone(),
    )
    def test_tensors_made_of_numpy_or_the_old_way_are_new_in_every_call(self, function) -> None:
        trace_like_eager(function, vector)

    @table(
        tensor_of_numpy=lambda x: torch.tensor(numpy.zeros(3, dtype=numpy.float32)).add_(x).clone(),
        as_tensor=lambda x: torch.as_tensor(numpy.zeros(3, dtype=numpy.float32)).add_(x).clone(),
    )
    def test_tensors_made_of_arrays_are_new_in_every_call(self, function) -> None:
        trace_like_eager(function, vector)

    def test_the_garbage_collector_has_no_say_in_it(self) -> None:
        def counts(x):
            made = torch.from_numpy(numpy.zeros(1, dtype=numpy.float32))
            gc.collect()
            made += 1
            return made + x

        program = fx.symbolic_trace(counts)
        assert [program(torch.zeros(1)).item() for _ in range(3)] == [1, 1, 1]

    def test_tensors_that_were_there_before_are_written_in_their_place(self) -> None:
        held = {"count": [torch.zeros(1)]}
        program = fx.symbolic_trace(lambda x: held["count"][0].add_(x).clone())
        assert [program(torch.ones(1)).item() for _ in range(3)] == [1, 2, 3]
        assert held["count"][0] == 3

    @table(
        from_numpy=lambda x: torch.from_numpy(numpy.ones(3, dtype=numpy.float32)) + x,
        old_constructor=lambda x: torch.Tensor([0.0, 1.0, 2.0]) + x,
    )
    def test_such_tensors_may_be_read(self, function) -> None:
        trace_like_eager(function, vector)


class TestConstants:
    @table(
        zeros=lambda x: torch.zeros(x.shape[0], 2) + x,
        zeros_tuple=lambda x: torch.zeros((x.shape[0], 2)) + x,
        zeros_keyword=lambda x: torch.zeros(size=(x.shape[0], 2)) + x,
        zeros_of_shape=lambda x: torch.zeros(x.shape) + x,
        full=lambda x: torch.full((x.shape[0], 2), 3.0) + x,
        arange=lambda x: torch.arange(x.shape[0]),
        eye=lambda x: torch.eye(x.shape[0]) @ x,
        linspace=lambda x: torch.linspace(0, 1, x.shape[0]),
        new_zeros=lambda x: x.new_zeros(x.shape[0], 2) + x,
        new_full=lambda x: x.new_full((x.shape[0], 2), 3.0),
        tensor_of_size=lambda x: torch.tensor(x.shape[0]) + x,
        tensor_of_list=lambda x: torch.tensor([x.shape[0], 1]) + x,
        like=lambda x: torch.full_like(x, 2.0),
        on_device=lambda x: torch.zeros(2, device=x.device, dtype=x.dtype) + x,
        in_device_block=lambda x: in_device_block(x),
        causal_mask=lambda x: torch.triu(torch.ones(x.size(1), x.size(1)), diagonal=1),
    )
    def test_factories_with_traced_sizes(self, function) -> None:
        program = trace_like_eager(function, x)
        other = torch.arange(10.0).reshape(5, 2)
        assert torch.equal(program(other), function(other)), "sizes are not baked in"

    @table(
        tensor=lambda x: torch.tensor([1.0, 2.0]) + x,
        several=lambda x: torch.stack([torch.tensor(1.0), torch.tensor(2.0)]) + x,
        computed=lambda x: torch.cumsum(torch.ones(2), 0).exp() + x,
        grid=lambda x: torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")[0] + x[:2],
        topk=lambda x: torch.topk(torch.arange(4.0), 2)[0] + x,
        unbound=lambda x: torch.eye(2).unbind(0)[0] + x,
        concatenated=lambda x: torch.cat([torch.zeros(1, 2), x]),
        traced_slice=lambda x: torch.arange(9)[: x.shape[1]] + x,
        one_hot=lambda x: F.one_hot(torch.tensor([0, 1]), 2) + x[:2],
    )
    def test_constants(self, function) -> None:
        trace_like_eager(function, x)

    @table(
        to_list=lambda x: [x * number for number in torch.arange(3).tolist()],
        item=lambda x: x * torch.tensor(2.0).item(),
        truth=lambda x: x + 1 if torch.tensor([1.0]).sum() > 0 else x,
        length=lambda x: x * len(torch.arange(3)),
        numpy=lambda x: x * int(torch.arange(3).numpy().sum()),
        number=lambda x: x * int(torch.tensor(3)),
        computed=lambda x: x * (torch.arange(4).float().mean() * 2).item(),
        index=lambda x: [x, x + 1][torch.tensor(1)],
    )
    def test_python_may_read_constants_and_no_dead_node_stays(self, function) -> None:
        program = trace_like_eager(function, x)
        assert not [node.name for node in program.graph.nodes if not node.users and node.op != "output"]
        assert all("torch." not in line for line in program.code.splitlines())

    def test_a_constant_made_in_the_program_is_new_in_every_call(self) -> None:
        program = trace_like_eager(lambda x: torch.zeros(3).add_(x), vector)
        assert "torch.zeros(3)" in program.code


def in_device_block(x):
    with torch.device("cpu"):
        return torch.zeros(x.shape[0], 2) + x


class TestWritesIntoConstants:
    def test_traced_values_written_into_a_constant(self) -> None:
        def forward(x):
            mask = torch.zeros(4)
            mask[1:] += x
            return mask

        trace_like_eager(forward, vector)

    @table(
        method=lambda x: torch.zeros(3).copy_(x),
        view=lambda x: (mask := torch.zeros(4), mask[:3].copy_(x), mask)[2],
        view_of_view=lambda x: (mask := torch.zeros(2, 4), mask[1][1:].copy_(x), mask)[2],
        view_used_later=lambda x: (mask := torch.zeros(4), view := mask[1:], mask[1:].copy_(x), view * 1)[3],
        store=lambda x: (mask := torch.zeros(4), mask.__setitem__(slice(1, None), x), mask)[2],
        out=lambda x: (mask := torch.empty(3), torch.add(x, 1, out=mask), mask * 2)[2],
        index_put=lambda x: torch.zeros(3).index_put_((torch.arange(3),), x),
        scatter=lambda x: torch.zeros(3).scatter_(0, torch.tensor([2, 0, 1]), x),
        twice=lambda x: (mask := torch.zeros(3), mask.add_(x), mask.mul_(2), mask)[3],
        random=lambda x: (noise := torch.empty(3), noise.uniform_(), noise + x)[2],
    )
    def test_traced_values_in_many_ways(self, function) -> None:
        trace_like_eager(function, vector)

    def test_storing_constants_and_traced_values(self) -> None:
        def forward(x):
            mask = torch.zeros(4)
            mask[0] = 1
            mask[1:] += x
            return mask

        trace_like_eager(forward, vector)

    def test_storing_constants(self) -> None:
        def forward(x):
            mask = torch.zeros(3)
            mask[0] = 1
            return mask + x

        trace_like_eager(forward, vector)

    @table(
        through_a_view=lambda x: (mask := torch.zeros(3), mask[1:].fill_(1), mask + x)[2],
        under_a_view=lambda x: (mask := torch.zeros(3), view := mask[1:], mask.fill_(1), view + x[1:])[3],
        out=lambda x: (mask := torch.zeros(3), torch.add(torch.ones(2), 1, out=mask[1:]), mask + x)[2],
    )
    def test_constants_written_into_views_of_constants(self, function) -> None:
        trace_like_eager(function, vector)

    @table(
        read=lambda x: torch.ones(3, 3).T @ x,
        data=lambda x: torch.ones(3).data + x,
    )
    def test_properties_of_constants(self, function) -> None:
        trace_like_eager(function, vector)

    def test_constants_written_through_a_property(self) -> None:
        trace_like_eager(lambda x: (mask := torch.zeros(3, 3), mask.T[0].fill_(1), mask + x)[2], vector)

    @table(
        itself=lambda x: torch.zeros(3).fill_(2) + x,
        in_steps=lambda x: (mask := torch.zeros(3), mask.add_(1), mask.mul_(3), mask + x)[3],
    )
    def test_constants_written_into_constants(self, function) -> None:
        trace_like_eager(function, vector)

    def test_a_constant_holding_traced_values_cannot_be_read_by_python(self) -> None:
        def forward(x):
            mask = torch.zeros(3)
            mask.copy_(x)
            return x * mask.tolist()[0]

        with pytest.raises(fx.TraceError, match=r"tolist\(\)"):
            fx.symbolic_trace(forward)

    def test_a_view_made_before_the_write_holds_them_too(self) -> None:
        def forward(x):
            mask = torch.zeros(3)
            view = mask[1:]
            mask.copy_(x)
            return x * view.tolist()[0]

        with pytest.raises(fx.TraceError, match=r"tolist\(\)"):
            fx.symbolic_trace(forward)

    def test_indexing_a_constant_with_a_traced_value_is_no_write(self) -> None:
        def forward(x):
            places = torch.arange(9)
            return places[x.long()] * places.tolist()[1]

        trace_like_eager(forward, vector)


class TestRandomDraws:
    @table(
        rand=lambda x: x + torch.rand(3),
        randn=lambda x: x + torch.randn(3),
        randint=lambda x: x + torch.randint(0, 9, (3,)),
        randperm=lambda x: x + torch.randperm(3),
        normal=lambda x: x + torch.normal(0.0, 1.0, (3,)),
        bernoulli=lambda x: x + torch.bernoulli(torch.full((3,), 0.5)),
        multinomial=lambda x: x + torch.multinomial(torch.ones(5), 3),
        in_place=lambda x: x + torch.empty(3).uniform_(),
        like=lambda x: x + torch.rand_like(torch.zeros(3)),
        initialised=lambda x: x + nn.init.normal_(torch.empty(3)),
        dropout=lambda x: x + F.dropout(torch.ones(3), 0.5),
        traced_size=lambda x: x + torch.rand(x.shape[0]),
        two=lambda x: x + torch.rand(3) - torch.rand(3),
    )
    def test_draws_are_recorded_and_use_no_random_state_while_tracing(self, function) -> None:
        torch.manual_seed(0)
        before = torch.get_rng_state()
        program = fx.symbolic_trace(function)
        assert torch.equal(torch.get_rng_state(), before)
        trace_like_eager(function, vector)
        assert len({tuple(program(*vector()).tolist()) for _ in range(20)}) > 1

    def test_draws_from_a_distribution_with_constants(self) -> None:
        trace_like_eager(lambda x: x + torch.distributions.Normal(0.0, 1.0).sample((3,)), vector)

    def test_draws_shaped_like_a_buffer(self) -> None:
        trace_like_eager(
            Stateful(lambda self, x: x + torch.rand_like(self.buffer) + torch.bernoulli(self.buffer / 2)), x
        )

    def test_a_branch_on_a_draw_is_refused(self) -> None:
        with pytest.raises(fx.TraceError, match="branch on"):
            fx.symbolic_trace(lambda x: x if torch.rand(1) > 0.5 else -x)

    def test_a_generator_from_outside_goes_on_where_it_was(self) -> None:
        generator = torch.Generator().manual_seed(3)
        program = fx.symbolic_trace(lambda x: x + torch.rand(3, generator=generator))
        first = program(torch.zeros(3))
        assert not torch.equal(first, program(torch.zeros(3)))
        generator.manual_seed(3)
        assert torch.equal(first, program(torch.zeros(3)))

    @pytest.mark.xfail(strict=True, reason="a generator made in the program is refused")
    def test_a_generator_made_in_the_program_is_new_in_every_call(self) -> None:
        trace_like_eager(lambda x: x + torch.rand(3, generator=torch.Generator().manual_seed(3)), vector)

    @pytest.mark.parametrize(
        ("function", "answer"),
        [(torch.rand, True), (F.dropout, True), (torch.Tensor.uniform_, True), (torch.add, False), (len, False)],
    )
    def test_is_random(self, function, answer: bool) -> None:
        assert is_random(function) is answer


class TestAttributesOfTracedValues:
    @table(
        shape=lambda x: (shape := x.shape, x.unsqueeze_(0), x + shape[0])[2],
        rank=lambda x: (rank := x.ndim, x.unsqueeze_(0), x + rank)[2],
    )
    def test_an_attribute_read_before_a_write_has_its_value_of_then(self, function) -> None:
        trace_like_eager(function, vector)


class TestInferenceMode:
    @staticmethod
    def constants(x):
        made = torch.zeros(3)
        made.add_(1)
        made[0] = 2
        torch.mul(made, 2, out=made)
        return x + made

    def test_constants_are_traced_there(self) -> None:
        with torch.inference_mode():
            program = fx.symbolic_trace(self.constants)
        for _ in range(2):
            assert torch.equal(program(torch.zeros(3)), torch.tensor([4.0, 2.0, 2.0]))

    def test_and_in_a_region_of_the_model(self) -> None:
        def model(x):
            with torch.inference_mode():
                made = self.constants(torch.zeros(3))
            return x + made.sum()

        assert fx.symbolic_trace(model)(torch.zeros(1)) == 8

    def test_calls_on_buffers(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("count", torch.zeros(1))

            def forward(self, x):
                self.count.add_(1)
                return x + self.count * 2

        model = Counting()
        with torch.inference_mode():
            program = fx.symbolic_trace(model)
        assert [program(torch.zeros(1)).item() for _ in range(2)] == [2, 4]
