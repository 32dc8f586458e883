"""Every result has a repr of one short line, a table as text, and HTML for notebooks."""

import pytest
import torch

import torchgraft
from torchgraft import zoo

MODEL = zoo.create("resnet18").eval()
INPUTS = (torch.ones(1, 3, 64, 64),)
PROGRAM = torchgraft.capture(MODEL, INPUTS)

RESULTS = {
    "cost": (lambda: torchgraft.cost(PROGRAM, INPUTS), "<Cost: ResNet, 7"),
    "memory": (lambda: torchgraft.memory(PROGRAM, INPUTS), "<Memory: ResNet, "),
    "shapes": (lambda: torchgraft.shapes(PROGRAM, INPUTS), "<Shapes: "),
    "liveness": (lambda: torchgraft.liveness(PROGRAM), "<Lifetimes: "),
    "effects": (lambda: torchgraft.effects(PROGRAM), "<ProgramEffects: "),
    "types": (lambda: torchgraft.check_types(torchgraft.symbolic_trace(MODEL)), "<Types: "),
    "record": (lambda: torchgraft.record(PROGRAM, INPUTS, reduce=True), "<Recording: "),
    "log_calls": (lambda: torchgraft.log_calls(MODEL, INPUTS), "<CallLog: "),
    "compare": (lambda: torchgraft.compare(PROGRAM, PROGRAM, INPUTS), "<ProgramComparison: no difference in "),
    "verify": (
        lambda: torchgraft.verify(MODEL, PROGRAM, INPUTS, other_values=False, other_sizes=False, gradients=False),
        "<Verification: ResNet: the program does what the model does",
    ),
    "doctor": (
        lambda: torchgraft.doctor(zoo.create("mlp"), zoo.example_inputs("mlp")),
        "<Diagnosis: MLP: captured (watched), ",
    ),
    "summary": (
        lambda: torchgraft.summary(MODEL, INPUTS),
        "<ModelSummary: ResNet, 68 modules, 11,689,512 parameters, ",
    ),
    "diff": (lambda: torchgraft.diff(PROGRAM, PROGRAM), "<ProgramDiff: ResNet -> ResNet: "),
    "pipeline": (
        lambda: torchgraft.passes.Pipeline("remove-dead-code")(torchgraft.symbolic_trace(MODEL)),
        "<PipelineReport: 1 pass, ",
    ),
    "split": (lambda: torchgraft.split(PROGRAM, torchgraft.Stages(2)), "<Split: 2 parts, "),
}


@pytest.mark.parametrize("name", RESULTS)
def test_short_repr_text_and_html(name):
    make, beginning = RESULTS[name]
    result = make()
    assert repr(result).startswith(beginning) and len(repr(result)) < 200 and "\n" not in repr(result)
    assert str(result) == result.text() and (len(str(result)) > len(repr(result)) or name in ("diff", "pipeline"))
    assert result._repr_html_().startswith("<") and result.rows() is not None
    assert result.to_json() and result._repr_html_() in result.to_html()


def test_repr_of_a_report(tmp_path):
    report = torchgraft.report(zoo.create("mlp").eval(), zoo.example_inputs("mlp"), folder=tmp_path / "out")
    assert repr(report) == f"<Report: MLP, {tmp_path / 'out' / 'index.html'}>"
