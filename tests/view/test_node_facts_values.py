"""What is known of values: plain facts of every kind of tensor, and texts of them."""

from __future__ import annotations

import pytest
import torch

import torchgraft
from torchgraft.view.node_facts import TensorFacts, facts_of, facts_text, known_facts, part


@pytest.mark.parametrize(
    ("value", "text", "memory_format"),
    [
        (torch.ones(2, 3), "f32[2, 3]", "contiguous_format"),
        (torch.ones(()), "f32[]", "contiguous_format"),
        (torch.ones(0, 3, dtype=torch.bool), "b8[0, 3]", "contiguous_format"),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), "f32[2, 3, 4, 5]", "channels_last"),
        (torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), "f32[2, 3, 4, 5, 6]", "channels_last_3d"),
        (torch.ones(4, 3).t(), "f32[3, 4]", None),
        (torch.ones(2, 2).to_sparse(), "f32[2, 2]", None),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8[2]", "contiguous_format"),
        (torch.empty(2, device="meta", dtype=torch.float8_e4m3fn), "float8_e4m3fn[2]", "contiguous_format"),
    ],
)
def test_tensors(value: torch.Tensor, text: str, memory_format) -> None:
    facts = facts_of(value)
    assert isinstance(facts, TensorFacts)
    assert facts_text(facts) == text and facts.memory_format == memory_format


def test_other_values() -> None:
    assert facts_of(None) is None and facts_of(3) == "int" and facts_of({"a": torch.ones(1)})[0].shape == (1,)
    nested = facts_of((torch.ones(1), [None, 2]))
    assert facts_text(nested) == "(f32[1], (None, int))"
    assert part(nested, "shape") == ((1,), None) and part(facts_of((1, "a")), "shape") is None
    assert facts_text(None) == "" and facts_of(()) == () and part((), "dtype") is None


def test_a_program_without_a_module_is_read_from_its_notes() -> None:
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    graph.output(graph.get_attr("w"))
    facts = known_facts(graph, (torch.ones(3),))
    assert facts[x].shape == (2,) and list(facts.values())[1] is None
