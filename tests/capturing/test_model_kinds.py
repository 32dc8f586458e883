"""`capture` on architectures of many kinds: each captured, looked into, and equal to eager; few have sizes fixed."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils import parametrizations, rnn

from tests.capturing.watched import captured_like_eager, given, is_looked_into, normal, runs_free
from torchgraft import capture


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


# ---- recurrent networks ----


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, (hidden, _) = self.layer(packed)
        padded, sizes = rnn.pad_packed_sequence(output, batch_first=True)
        return padded, sizes, hidden


class PackedInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 3)

    def forward(self, packed: rnn.PackedSequence) -> Any:
        output, hidden = self.layer(packed)
        return output.data, hidden


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(4, 4), nn.GRUCell(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.new_zeros(x.size(1), 4)
        state, outputs = torch.zeros_like(hidden), []
        for step in range(x.size(0)):
            hidden, state = self.first(x[step], (hidden, state))
            hidden = self.second(x[step], hidden)
            outputs.append(hidden)
        return torch.stack(outputs)


def _packed(batch: int) -> rnn.PackedSequence:
    return rnn.pack_padded_sequence(torch.randn(5, batch, 4), torch.tensor([5, 3, 2, 1][:batch]))


def test_packed_sequences_are_taken_along() -> None:
    lengths = torch.tensor([5, 2, 4])
    others = [given(normal(3, 5, 4), torch.tensor([1, 5, 2])), given(normal(2, 5, 4), torch.tensor([3, 5]))]
    program = captured_like_eager(Packed, given(normal(3, 5, 4), lengths), others)
    assert is_looked_into(program)
    assert [node.target for node in program.graph.find_nodes(op="call_module")] == ["layer"]


def test_packed_sequences_as_inputs() -> None:
    captured_like_eager(PackedInput, given(lambda: _packed(3)), [given(lambda: _packed(2))])


# ---- attention ----


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: torch.Tensor, **masks: Any) -> Any:
        return self.layer(x, x, x, **masks)


@pytest.mark.parametrize("options", [{}, {"batch_first": True, "add_bias_kv": True}, {"dropout": 0.3}], ids=str)
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"need_weights": False},
        {"attn_mask": torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)},
        {"attn_mask": torch.zeros(4, 4), "average_attn_weights": False},
        {"key_padding_mask": torch.tensor([[False, False, False, True]] * 4)},
    ],
    ids=lambda masks: "-".join(masks) or "none",
)
def test_attention_with_every_kind_of_mask(options: dict[str, Any], masks: dict[str, Any]) -> None:
    captured_like_eager(functools.partial(Attention, **options), given(normal(4, 4, 8), **masks), is_copied=False)


@pytest.mark.parametrize("is_training", [True, False])
def test_transformer(is_training: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).train(is_training)

    captured_like_eager(make, given(normal(2, 4, 8)), [given(normal(3, 5, 8))], is_copied=False)


# ---- hand-written models ----


class Routed(Linear):
    """A mixture of experts, routed by nonzero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        mask, result = functional.one_hot(chosen, 3).permute(2, 1, 0), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(mask[number])
            if token.shape[0] > 0:
                result.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return result


class Messages(Linear):
    """A graph network by index_add and scatter."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> Any:
        source, target = edges
        messages = self.linear(x[source] * x[target])
        total = torch.zeros(x.size(0), 4).index_add_(0, target, messages)
        degree = torch.zeros(x.size(0)).scatter_add_(0, target, torch.ones(target.numel()))
        return total / degree.clamp(min=1)[:, None]


class Adaptive(Linear):
    """A differential equation, solved with steps that its values choose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time, step = 0.0, 0.25
        while time < 1.0:
            first = self.linear(x).tanh()
            error = (first - self.linear(x + step * first).tanh()).abs().max()
            if error > 0.3 and step > 0.05:
                step = step / 2
                continue
            x, time = x + step * first, time + step
            step = step * min(2.0, max(0.5, (0.1 / (error.item() + 1e-9)) ** 0.5))
        return x


class Beam(Linear):
    def forward(self, hidden: torch.Tensor, width: int = 2) -> Any:
        batch = hidden.size(0)
        hidden = hidden.repeat_interleave(width, 0)
        scores, path = torch.full((batch, width), -1e9), torch.zeros(batch, width, 1, dtype=torch.int64)
        scores[:, 0] = 0
        for _ in range(2):
            hidden = self.linear(hidden).tanh()
            total = (scores.unsqueeze(-1) + hidden.log_softmax(-1).view(batch, width, -1)).view(batch, -1)
            scores, index = total.topk(width, -1)
            hidden = hidden[(index // 4 + torch.arange(batch)[:, None] * width).view(-1)]
            path = torch.cat([path, (index % 4).unsqueeze(-1)], -1)
            if (index % 4 == 9).all():
                break
        return path, scores


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> Any:
        spectrum = torch.fft.rfft(x)
        kept = torch.zeros(*x.shape[:-1], x.size(-1) // 2 + 1, dtype=torch.complex64)
        kept[..., :3] = spectrum[..., :3] * self.weight
        return torch.fft.irfft(kept, n=x.size(-1)), spectrum.abs(), torch.view_as_real(spectrum)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> Any:
        mean, spread = self.encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, spread.exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        return self.decoder(posterior.rsample()), torch.distributions.kl_divergence(posterior, prior).sum()


class Penalised(Linear):
    """The critic of a GAN with a gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (torch.rand(x.size(0), 1) * x).requires_grad_()
        (gradient,) = torch.autograd.grad(self.linear(mixed).sum(), mixed, create_graph=True)
        return self.linear(x).mean() + ((gradient.norm(2, 1) - 1) ** 2).mean()


class Losses(Linear):
    """Modules that are made by the forward, as most models of transformers make their loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.CrossEntropyLoss()(self.linear(x), labels)
        return loss + nn.MSELoss(reduction="sum")(x, x * 2) + nn.Dropout(0.5)(x).sum()


class Dual(Linear):
    """Forward-mode differentiation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return forward_ad.unpack_dual(self.linear(dual).sin()).tangent


class Sampled(Linear):
    """A spatial transformer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = self.linear(functional.adaptive_avg_pool2d(x, 2).flatten(1)).repeat(1, 2)[:, :6].view(-1, 2, 3)
        return functional.grid_sample(x, functional.affine_grid(moved, x.size(), align_corners=False))


class Mixed(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width = x.shape
        weights = (x @ x.transpose(0, 1) / math.sqrt(width)).softmax(-1)
        return torch.func.functional_call(
            self.linear, {name: value * 2 for name, value in self.linear.named_parameters()}, (weights @ x,)
        )


class Tensors(Linear):
    """Tensors that are neither parameters nor buffers, handed to a leaf."""

    outside = torch.ones(4)

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.full((4,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.plain) + self.linear(Tensors.outside)


def doubled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


class HooksOnTensors(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.register_hook(doubled)
        return y * 3


_EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
Example = Callable[[], Any]
FREE: list[tuple[type[nn.Module], Example, Example]] = [
    (Messages, given(normal(3, 4), _EDGES), given(normal(5, 4), _EDGES)),
    (Spectral, given(normal(2, 8)), given(normal(3, 12))),
    (Losses, given(normal(2, 4), torch.tensor([0, 1])), given(normal(3, 4), torch.tensor([0, 1, 3]))),
    *[
        (cls, given(normal(3, 4)), given(normal(5, 4)))
        for cls in (Dual, Penalised, Mixed, Tensors, HooksOnTensors, Variational)
    ],
    (Sampled, given(normal(2, 1, 6, 6)), given(normal(3, 1, 5, 8))),
    (Beam, given(normal(2, 4)), given(normal(3, 4))),
]


@pytest.mark.parametrize(("cls", "example", "other"), FREE, ids=lambda value: getattr(value, "__name__", ""))
def test_models_whose_sizes_stay_free(cls: type[nn.Module], example: Example, other: Example) -> None:
    program = captured_like_eager(cls, example, [other])
    assert is_looked_into(program) and runs_free(program, other)


@pytest.mark.parametrize("cls", [Routed, Adaptive], ids=lambda cls: cls.__name__)
def test_models_that_values_steer(cls: type[nn.Module]) -> None:
    others = [given(normal(5, 4)), given(lambda: torch.randn(3, 4) * 30), given(lambda: torch.zeros(3, 4))]
    assert is_looked_into(captured_like_eager(cls, given(normal(3, 4)), others))


def test_cells_in_a_loop() -> None:
    program = captured_like_eager(Cells, given(normal(3, 2, 4)), [given(normal(3, 5, 4)), given(normal(4, 2, 4))])
    assert is_looked_into(program) and not runs_free(program, given(normal(4, 2, 4)))


# ---- modules of special kinds ----


class Circle(Linear):
    """A module that knows its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.parent = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_modules_in_a_circle() -> None:
    model, x = Circle(), torch.randn(5, 4)
    program = capture(model, (torch.ones(3, 4),))
    assert is_looked_into(program)
    torch.testing.assert_close(program(x), model(x))


def test_only_the_module_that_changes_itself_is_said_to_be_kept() -> None:
    """The old weight_norm computes the weight in a hook, and keeps it as an attribute."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[0])
    torch.manual_seed(0)
    program = captured_like_eager(lambda: model, given(normal(3, 4)), levels=("function",), is_copied=False)
    assert list(program.meta["kept_whole"]) == ["0"]
    assert [node.target for node in program.graph.find_nodes(op="call_module")] == ["0"]


@torch.jit.script
def scripted(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, int]:
    return x * factor, x.size(0)


class Scripted(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, count = scripted(self.linear(x), x.shape[1])
        return y * count


def test_compiled_functions_are_calls() -> None:
    import pickle

    program = captured_like_eager(Scripted, given(normal(3, 4)), [given(normal(5, 4))])
    assert is_looked_into(program) and program.graph.find_nodes(op="call_function", target=scripted)
    x = torch.ones(5, 4)
    torch.testing.assert_close(pickle.loads(pickle.dumps(program))(x), program(x))


class Attempts(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.linear(x) * self.linear.weight[0]
        except IndexError as error:
            raise ValueError("sizes do not fit") from error


def test_an_error_that_is_only_explained_keeps_nothing_whole() -> None:
    assert is_looked_into(captured_like_eager(Attempts, given(normal(3, 4)), levels=("function",)))


class TwoThousand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh() * 0.01
        return x


def test_two_thousand_layers() -> None:
    program = captured_like_eager(TwoThousand, given(normal(2, 2)), levels=("module",), is_copied=False)
    assert len(program.graph.find_nodes(op="call_module")) == 2000


# ---- modules made on the way, notes on modules, methods called from outside ----


class Sliced(nn.Module):
    """Makes modules of its own modules while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1:](Twice(self.layers[0])(x))


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))


@pytest.mark.parametrize("is_training", [False, True])
def test_modules_made_of_the_models_own(is_training: bool) -> None:
    program = captured_like_eager(lambda: Sliced().train(is_training), given(normal(3, 4)), [given(normal(5, 4))])
    assert is_looked_into(program)


class MadeWithWeights(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear(4, 4)(self.linear(x))


def test_a_module_made_with_weights_of_its_own_is_drawn_anew() -> None:
    program = captured_like_eager(MadeWithWeights, given(normal(3, 4)))
    assert not is_looked_into(program)


class Noted(Linear):
    """Passes something on in an attribute, and takes it away again."""

    def __init__(self) -> None:
        super().__init__()
        self.note: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note = x * 2
        found = self.linear(x) + self._noted()
        self.note = None
        return found

    def _noted(self) -> torch.Tensor:
        return self.note


class Switched(Linear):
    """Changes a mode for a part of its work."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()
        self.is_off = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_off = True
        first = self.part(x)
        self.is_off = False
        return first + self.part(x)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_off else self.dropout(self.linear(x))


@pytest.mark.parametrize("kind", [Noted, Switched])
def test_notes_that_are_taken_away_again(kind: type[nn.Module]) -> None:
    program = captured_like_eager(kind, given(normal(3, 4)), [given(normal(5, 4))])
    assert is_looked_into(program)


class Reading(nn.Module):
    """Is kept whole, because it counts, and reads what another module has noted."""

    def __init__(self, other: list[nn.Module]) -> None:
        super().__init__()
        self.other, self.calls = other, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.other[0].note


class NotesForOthers(Noted):
    def __init__(self) -> None:
        super().__init__()
        self.reading = Reading([self])

    def _noted(self) -> torch.Tensor:
        return self.reading(self.note)


class Borrowed(Linear):
    """Runs a part in another mode, and with another number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dropout.p = 0.9
        found = self.dropout(x)
        self.dropout.p = 0.1
        return found


class Quiet(Borrowed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mode = bool(self.dropout.training)
        self.dropout.training = False
        found = self.dropout(x)
        self.dropout.training = mode
        return found


@pytest.mark.parametrize("kind", [NotesForOthers, Borrowed, Quiet])
def test_notes_that_are_read_where_nobody_watches(kind: type[nn.Module]) -> None:
    model, x = kind().train(), torch.randn(3, 4)
    program = capture(model, (x,))
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    assert torch.equal(program(x), expected)
    assert program.meta["kept_whole"]


class Structure(nn.Module):
    """Is never called itself; its method counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


class Encoder(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Structure()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.parts[0].prepare(x))


class Around(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.linear(x)).relu()


def test_a_module_whose_method_is_called_keeps_its_caller_whole() -> None:
    model, x = Around(), torch.randn(3, 4)
    program = capture(model, (x,))
    assert "encoder" in program.meta["kept_whole"] and "" not in program.meta["kept_whole"]
    assert torch.equal(program(x), model(x))
    assert model.encoder.parts[0].calls == 2


def test_a_scripted_model_is_one_call() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(nn.Linear(4, 4))
    program = capture(model, (torch.ones(2, 4),))
    assert list(program.meta["kept_whole"]) == [""]
    assert torch.equal(program(torch.ones(5, 4)), model(torch.ones(5, 4)))
