"""Programs that have copies of what a model holds are never used after that has changed, wherever the model has it."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import adapt, lower
from torchgraft.errors import BackendError


class Copying(torchgraft.Backend):
    """Like the runtimes: what it has compiled shares no memory with the model."""

    name, sizes_are_free = "copying", True

    def compile(self, part: Any, inputs: Any, options: Any) -> Any:
        return copy.deepcopy(part).forward


COPYING = Copying()
GLOBAL = torch.ones(4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.k, self.scales, self.lists = nn.Linear(4, 4), 2.0, [1.0], [torch.ones(4)]
        self.config = types.SimpleNamespace(table={"t": [torch.ones(4)]})

    def forward(self, x: Any) -> Any:
        x = self.linear(x) * self.k * self.scales[0]
        return x * self.lists[0] * self.config.table["t"][0]


def _set(path: str, value: Any) -> Callable[[Layer], None]:
    return lambda layer: exec(f"layer.{path} = value", {"layer": layer, "value": value})


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "a weight": _set("linear.weight", nn.Parameter(torch.full((4, 4), 5.0))),
    "the values of a weight": lambda layer: layer.linear.weight.mul_(3),
    "the data of a weight": _set("linear.weight.data", torch.full((4, 4), 5.0)),
    "an attribute": _set("k", 5.0),
    "an item of a list": _set("scales[0]", 5.0),
    "a layer": _set("linear", nn.Linear(4, 4)),
    "the mode": lambda layer: layer.train(),
    "the values of a tensor in a list": lambda layer: layer.lists[0].mul_(5),
    "the values of a tensor in a configuration": lambda layer: layer.config.table["t"][0].mul_(5),
}
WAYS: dict[str, Callable[[Layer], Any]] = {
    "module": lambda layer: layer,
    "function": lambda layer: lambda x: layer(x),
    "method": lambda layer: layer.forward,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_model_or_a_function_uses_is_watched(way: str, change: str) -> None:
    layer, x = Layer().eval(), torch.randn(3, 4)
    subject = WAYS[way](layer)
    lowered, adapted = lower(subject, x, backend=COPYING), adapt(subject)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(lowered(x), adapted(x))
        CHANGES[change](layer)
        torch.testing.assert_close(adapted(x), subject(x))
        if (way, change) == ("module", "the mode"):  # where a lowered module is the model
            torch.testing.assert_close(lowered(x), subject(x))
            return
        with pytest.raises(BackendError, match="was lowered with other weights"):
            lowered(x)
        layer.eval()
        lowered.refresh()
        torch.testing.assert_close(lowered(x), subject(x))


def test_tensors_that_no_module_has_are_watched() -> None:
    closed_over = torch.ones(4)
    for function, tensor in [
        (lambda x: (x * GLOBAL).relu(), GLOBAL),
        (lambda x: (x * closed_over).relu(), closed_over),
    ]:
        lowered = lower(function, torch.ones(2, 4), backend=COPYING)
        lowered(torch.ones(2, 4))
        tensor.mul_(5)
        with pytest.raises(BackendError, match="lowered with other weights"):
            lowered(torch.ones(2, 4))
        lowered.refresh()
        torch.testing.assert_close(lowered(torch.ones(2, 4)), torch.full((2, 4), 5.0))
        tensor.fill_(1)


class Updating(nn.Module):
    """One path writes what another one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Any, update: bool = False, plain: bool = False) -> Any:
        if update:
            self.total.add_(1)
        return self.linear(x) if plain else self.linear(x) * self.linear.weight[0] + self.total


@pytest.mark.parametrize("paths", ["AUAUPAU", "UAUAPA", "PAPUPAU", "UUU"])
@pytest.mark.parametrize("backend", ["native", COPYING])
def test_what_one_path_writes_and_another_reads(paths: str, backend: Any) -> None:
    calls: dict[str, dict[str, bool]] = {"A": {}, "U": {"update": True}, "P": {"plain": True}}
    model, x = Updating().eval(), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    lowered = lower(model, x, calls[paths[0]], backend=backend)
    with torch.no_grad():
        for path in paths:
            torch.testing.assert_close(lowered(x, **calls[path]), plain(x, **calls[path]))
            assert torch.equal(model.total, plain.total)


def test_a_copy_in_another_precision_does_not_write_for_the_model() -> None:
    model, x = Updating().eval(), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    lowered = lower(model, x, {"update": True}, backend="native", precision="bf16", verify=False)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(lowered(x, update=True), plain(x, update=True))
        torch.testing.assert_close(lowered(x), plain(x), rtol=0.1, atol=0.1)  # of a copy as the model is by now
    assert torch.equal(model.total, plain.total)
    assert "it writes 'total', and computes with a copy" in lowered.explain()


class Counting(nn.Module):
    """A path whose check comes after a write, so that it runs in Python, changes an attribute that another path reads."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.seen = 2.0, [1.0]

    def forward(self, x: Any, count: bool = False) -> Any:
        if count:
            x.add_(1)
            if x.sum() > 0:
                x = x * 2
            self.k += 1
            self.seen[0] += 1
            self.added = 3.0
        return x * self.k * self.seen[0] * getattr(self, "added", 1.0)


@pytest.mark.parametrize("paths", ["ACACAAC", "CACA", "CCC"])
@pytest.mark.parametrize("follows", ["adapt", "lower"])
def test_attributes_that_one_path_changes_and_another_reads(paths: str, follows: str) -> None:
    model, plain = Counting().eval(), Counting().eval()
    module = adapt(model) if follows == "adapt" else lower(model, torch.ones(3), backend=COPYING)
    for path in paths:
        count = path == "C"
        try:
            found = module(torch.ones(3), count=count)
        except BackendError:  # refused, which is not stale
            assert follows == "lower"
            module.refresh()
            found = module(torch.ones(3), count=count)
        torch.testing.assert_close(found, plain(torch.ones(3), count=count))
        assert (model.k, model.seen) == (plain.k, plain.seen)


class Record(dict):
    """Made by Python code of which nobody knows what it does."""

    def __init__(self, result: Any) -> None:
        super().__init__(result=result)
        self.result = result


class Recording(nn.Module):
    """Asked for more, it installs what collects it, as models of transformers do, and says that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.found = nn.Linear(4, 4), []

    def forward(self, x: Any, more: bool = False) -> Any:
        if more and not hasattr(self, "installed"):
            self.linear.register_forward_hook(lambda module, args, result: self.found.append(result))
            self.installed = True
        self.found.clear()
        x = self.linear(x)
        return Record(x if not more else torch.stack([*self.found, x]))


def test_weights_of_programs_that_make_objects_are_watched() -> None:
    model, x = Recording().eval(), torch.randn(2, 4)
    lowered = lower(model, x, backend=COPYING)
    with torch.no_grad():
        torch.testing.assert_close(lowered(x).result, model(x).result)
        model.linear.weight.mul_(3)
        with pytest.raises(BackendError, match=r"the values of 'linear\.weight' have changed"):
            lowered(x)


def test_verifying_leaves_a_model_as_it_was() -> None:
    model, plain, x = Recording().eval(), Recording().eval(), torch.randn(2, 4)
    plain.load_state_dict(model.state_dict())
    lowered = lower(model, x, backend="native")
    with torch.no_grad():
        for more in (False, True, True, False, True):
            torch.testing.assert_close(lowered(x, more=more).result, plain(x, more=more).result)
    assert len(model(x, more=True).result) == 2


def _step(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], None]:
    def step(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer(model.parameters(), lr=0.5, **options).step()

    return step


def _in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model[0].weight.mul_(3)


def _in_a_thread(model: nn.Module) -> None:
    def write() -> None:
        with torch.no_grad():
            model[0].weight.mul_(3)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


def _swapped(model: nn.Module) -> None:
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(4, 4)))


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, 5) for name, value in model.state_dict().items()}


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda model: model[0].bias.fill_(5),
    "through a view": lambda model: model[0].weight[0].fill_(5),
    "through detach": lambda model: model[0].weight.detach().copy_(torch.full((4, 4), 5.0)),
    "statistics of a norm": lambda model: model[1].running_mean.add_(1),
    "an item of `.data`": lambda model: setattr(model[0].bias, "data", model[0].bias.data[torch.tensor([1, 0, 3, 2])]),
    "turned by `.data`": lambda model: setattr(model[0].weight, "data", model[0].weight.data.t()),
    "vector_to_parameters": lambda model: nn.utils.vector_to_parameters(torch.ones(28), model.parameters()),
    "load_state_dict": lambda model: model.load_state_dict(_state(model)),
    "load_state_dict, assigned": lambda model: model.load_state_dict(_state(model), assign=True),
    "to another type and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "a step": _step(torch.optim.SGD, foreach=False),
    "a step for all at once": _step(torch.optim.SGD, foreach=True),
    "a fused step": _step(torch.optim.SGD, fused=True),
    "a fused step of Adam": _step(torch.optim.Adam, fused=True),
    "in inference mode": _in_inference_mode,
    "in another thread": _in_a_thread,
    "swapped": _swapped,
}


@pytest.mark.parametrize("write", WRITES)
def test_however_a_weight_is_written(write: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(3, 4)
    lowered = lower(model, x, backend=COPYING)
    with torch.no_grad():
        before = model(x)
        torch.testing.assert_close(lowered(x), before)
        WRITES[write](model)
        assert not torch.equal(model(x), before)
        for _ in range(2):  # also when it is asked again
            with pytest.raises(BackendError, match="was lowered with other weights"):
                lowered(x)
        lowered.refresh()
        torch.testing.assert_close(lowered(x), model(x))


@pytest.mark.slow
def test_a_fused_step_that_is_compiled() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(3, 4)
    lowered = lower(model, x, backend=COPYING)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step = torch.compile(torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step, backend="aot_eager")
    for _ in range(2):
        step()
        with pytest.raises(BackendError, match="was lowered with other weights"):
            lowered(x)
        lowered.refresh()
        torch.testing.assert_close(lowered(x), model(x).detach())


def test_a_write_that_torch_does_not_count_needs_a_refresh() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(3, 4)
    lowered = lower(model, x, backend=COPYING)
    with torch.no_grad():
        model[0].weight.data.copy_(torch.ones(4, 4))
        lowered.refresh()
        torch.testing.assert_close(lowered(x), model(x))


def test_batches_that_norms_count_are_no_change_of_weights() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(3, 4)
    lowered = lower(model, x, backend=COPYING)
    model[1].num_batches_tracked.add_(1)
    torch.testing.assert_close(lowered(x), model(x).detach())

    class Reading(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * self[1].num_batches_tracked

    model = Reading(*model).eval()
    lowered = lower(model, x, backend=COPYING)
    model[1].num_batches_tracked.add_(1)
    with pytest.raises(BackendError, match=r"'1\.num_batches_tracked' have changed"):
        lowered(x)


def test_threads_never_get_stale_answers() -> None:
    """Several threads call while one writes: what comes back is the model before or after, and after the write only after."""
    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.ones(1, 4)
    lowered = lower(model, x, backend=COPYING)
    with torch.no_grad():
        before = model(x)
    written = threading.Event()
    problems: list[str] = []
    calls: list[int] = []

    def call() -> None:
        for _ in range(300):
            is_after = written.is_set()
            try:
                with torch.no_grad():
                    found = lowered(x)
            except BackendError:
                lowered.refresh()
                continue
            calls.append(1)
            if is_after and torch.equal(found, before):
                problems.append("stale")

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    with torch.no_grad():
        model[0].weight.mul_(3)
    written.set()
    for thread in threads:
        thread.join()
    assert not problems and calls
    with torch.no_grad():
        torch.testing.assert_close(lowered(x), model(x))
