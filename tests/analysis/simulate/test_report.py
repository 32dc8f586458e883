"""A simulation as text, HTML, JSON, rows and parts."""

import json

import pytest
import torch
from torch import nn

from torchgraft import simulate


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.second(self.first(x).relu())


@pytest.fixture(scope="module")
def found():
    return simulate(Named().eval(), torch.empty(4, 64, device="meta"))


def test_text(found):
    lines = str(found).splitlines()
    assert lines[0].startswith("Named, one run on NVIDIA H200, fp32, eager: ") and lines[0].endswith(
        "33.6 MB at the peak"
    )
    assert lines[1].startswith("device at work ") and ", host " in lines[1] and " J; bound by host " in lines[1]
    assert lines[3].split() == ["kind", "kernels", "time", "share", "FLOP/s", "bytes/s"]
    assert lines[4].split()[:2] == ["matmul", "2"]
    assert {line.split()[0] for line in lines[8:]} == {"first", "relu", "second"}
    assert len(found.text(most=1).splitlines()) == len(lines) - 2
    assert repr(found) == f"<Simulation: {found.headline()}>"


def test_a_training_step_says_so():
    step = simulate(Named(), torch.empty(4, 64, device="meta"), optimizer=torch.optim.SGD, mode="graph")
    assert step.headline().startswith("Named, one training step on NVIDIA H200, fp32, graph: ")
    assert "host" not in str(step).splitlines()[1] and "(between nodes)" in str(step)


def test_html(found):
    page = found._repr_html_()
    assert page.count("<table") == 2 and "3 nodes" in page and found.headline() in page


def test_json(found):
    content = json.loads(found.to_json())
    assert content["seconds"] == found.seconds and content["machine"] == "NVIDIA H200"
    assert [row["name"] for row in content["nodes"]] == ["first", "relu", "second"]
    assert len(content["kernels"]) == 3 and content["memory"]["peak"] == found.peak_bytes - content["workspace_bytes"]
    assert set(content["bounds"]) == {"compute", "memory", "launch", "host"}


def test_rows_and_parts(found):
    assert [row["name"] for row in found.rows()] == ["first", "relu", "second"]
    assert [row["kind"] for row in found.rows("kernel")] == ["matmul", "elementwise", "matmul"]
    with pytest.raises(
        ValueError, match='rows are by "node" or by "kernel", not "module"'.replace('"module"', "'module'")
    ):
        found.rows("module")
    assert found["first"] is found.nodes[0] and found["first"].module == "first" and found["first"].kernels == 1
    with pytest.raises(KeyError, match="no node named 'third' in Named"):
        found["third"]
