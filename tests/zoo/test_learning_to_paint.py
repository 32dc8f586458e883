"""The actor of Learning to Paint turns nine planes of 128x128 into the parameters of five strokes."""

import torch
import torch.fx

from torchgraft import zoo
from torchgraft.zoo.learning_to_paint import LearningToPaintActor


def test_outputs_are_five_strokes_of_thirteen_parameters_between_zero_and_one():
    (image,) = zoo.example_inputs("learning_to_paint")
    assert image.shape == (1, 9, 128, 128)
    strokes = LearningToPaintActor().eval()(image)
    assert strokes.shape == (1, 5 * 13)
    assert ((strokes > 0) & (strokes < 1)).all()


def test_every_stage_halves_the_image():
    model = LearningToPaintActor().eval()
    sizes = []
    for name in ("conv1", "layer1", "layer2", "layer3", "layer4"):
        model.get_submodule(name).register_forward_hook(lambda _module, _inputs, y: sizes.append(y.shape[-1]))
    model(*zoo.example_inputs("learning_to_paint"))
    assert sizes == [64, 32, 16, 8, 4]


def test_one_trace_serves_other_batches():
    model = LearningToPaintActor().eval()
    traced = torch.fx.symbolic_trace(model)
    inputs = zoo.example_inputs("learning_to_paint", batch=3)
    assert torch.equal(traced(*inputs), model(*inputs))
