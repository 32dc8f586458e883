"""FLOPs of language models against figures counted by hand, and a shape for every tensor of their programs."""

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import zoo
from torchgraft.interpreter import Interpreter
from torchgraft.passes.propagate_shapes import note_shapes

BATCH, LENGTH, WIDTH, WORDS, LAYERS = 2, 8, 16, 32, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, is_causal):
        query, key, value = self.project(self.norm(x)).view(BATCH, -1, 2, 3 * WIDTH // 2).transpose(1, 2).chunk(3, -1)
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        x = x + self.out(heads.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, ids, mask=None):
        x = self.words(ids)
        # A read of values, as models of transformers do: a run on fake tensors cannot follow it.
        is_causal = mask is None or bool(mask.all())
        for block in self.blocks:
            x = block(x, is_causal)
        return x


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, mask=None, **options):
        return {"logits": self.head(self.body(ids, mask))}


IDS = torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
KEYWORDS = {"ids": IDS, "mask": torch.ones(BATCH, LENGTH)}
TOKENS = BATCH * LENGTH
# Two for every weight and token.
LINEAR = 2 * TOKENS * (LAYERS * (4 * WIDTH * WIDTH + 8 * WIDTH * WIDTH) + WIDTH * WORDS)
PAIRS = LENGTH * (LENGTH + 1) // 2
ATTENTION = (
    LAYERS * BATCH * 2 * (PAIRS * WIDTH) * 2
)  # query by key, and weights by value, for the pairs that are not masked


@pytest.mark.parametrize("level", ["module", "function"])
def test_flops_of_a_captured_language_model(level):
    model = LanguageModel().eval()
    found = torchgraft.cost(torchgraft.capture(model, (), KEYWORDS, level=level), (), KEYWORDS, backward=False)
    linear = sum(entry.forward.flops for entry in found.modules.values() if entry.type == "Linear")
    assert linear == LINEAR
    attention = sum(work.macs for name, (work, _) in found.operators.items() if "attention" in name or "bmm" in name)
    assert 2 * attention == ATTENTION


def test_summary_and_report_count_what_is_inside(tmp_path):
    model = LanguageModel().eval()
    rows = torchgraft.summary(model, (), KEYWORDS).facts.modules
    assert sum(row.flops or 0 for row in rows if row.type == "Linear") == LINEAR
    assert 0.8 < LINEAR / rows[0].flops < 0.95
    made = torchgraft.report(model, (), KEYWORDS, folder=tmp_path / "out")
    share = f"{4 * LAYERS + 1} Linear do {LINEAR / rows[0].flops:.1%} of the "
    assert any(share in fact.text for fact in made.facts), made.facts
    assert "f32[2, 8, 32]" in (tmp_path / "out/programs/module.py").read_text()


class Kinds(Interpreter):
    """Which nodes give a tensor."""

    def run_node(self, n):
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.tensors.append(n)
        return value


def nodes_without_shape(model, kwargs, level):
    program = torchgraft.capture(model, (), kwargs, level=level)
    note_shapes(program, (), kwargs)
    run = Kinds(program)
    run.tensors = []
    run.run(*torchgraft.codegen.calling.placeholder_values(program, (), kwargs).values())
    assert run.tensors
    return [node.name for node in run.tensors if "tensor_meta" not in node.meta]


@pytest.mark.parametrize("level", ["module", "function"])
def test_every_tensor_of_a_language_model_has_a_shape(level):
    assert nodes_without_shape(LanguageModel().eval(), KEYWORDS, level) == []
    ids = {"ids": zoo.example_inputs("transformer")[0]}
    assert nodes_without_shape(zoo.create("transformer").eval(), ids, level) == []


@pytest.mark.zoo
@pytest.mark.parametrize("level", ["module", "function"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_models_of_transformers(name, level):
    pytest.importorskip("transformers")
    from torchgraft.cli.libraries import library_model

    model = library_model("hf", name).model.eval()
    ids = torch.randint(3, 100, (1, 16), generator=torch.Generator().manual_seed(0))
    kwargs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})
    assert nodes_without_shape(model, kwargs, level) == []
    if name == "llama":
        rows = torchgraft.summary(model, (), kwargs).facts.modules
        weights = sum(row.parameters for row in rows if row.type == "Linear")
        assert sum(row.flops or 0 for row in rows if row.type == "Linear") == 2 * 16 * weights
        assert 2 * 16 * weights / rows[0].flops > 0.85
