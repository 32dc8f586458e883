"""What a model of transformers is fed: found by its parameters, its configuration and its own complaints."""

from types import SimpleNamespace

import torch
from torch import nn

from torchgraft.cli.library_inputs import fitting_inputs


def configuration(**fields):
    found = SimpleNamespace(vocab_size=128, image_size=8, num_channels=4, **fields)
    found.get_text_config = lambda: found
    return found


class Words(nn.Module):
    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(128, 4)

    def forward(self, input_ids, decoder_input_ids=None, pixel_values=None):
        return self.words(input_ids).sum() + self.words(decoder_input_ids).sum()


class WordsBesidePictures(Words):
    """Complains of a None, as such models do, and takes three channels whatever its configuration says."""

    def forward(self, input_ids=None, pixel_values=None, attention_mask=None):
        batch, channels, _, _ = pixel_values.shape
        return self.words(input_ids).sum() + pixel_values.view(batch, 3, -1).mean() * (channels == 3) / (channels == 3)


class Sound(nn.Module):
    main_input_name = "input_values"

    def forward(self, input_values, bbox=None):
        if bbox is None:
            raise ValueError("You have to specify bbox")
        return nn.functional.conv1d(input_values[:, None], torch.ones(1, 1, 400)) + bbox.sum()


class Picky(nn.Module):
    def forward(self, tree):
        return tree.leaves


def test_encoders_with_decoders_get_words_for_both():
    assert fitting_inputs(Words(), configuration()) == [
        "input_ids:1x16:int64:112",
        "decoder_input_ids:1x16:int64:112",
    ]


def test_a_picture_that_the_model_misses_is_added_in_a_form_that_it_takes():
    with torch.device("meta"):
        empty = WordsBesidePictures()
    for model in (empty, WordsBesidePictures()):
        found = fitting_inputs(model, configuration())
        assert found == ["input_ids:1x16:int64:112", "pixel_values:1x3x8x8:float32"]


def test_a_model_without_weights_that_asks_for_numbers_is_taken_to_run():
    class Asks(Words):
        def forward(self, input_ids):
            return self.words(input_ids) if (input_ids > 3).all() else None

    with torch.device("meta"):
        model = Asks()
    assert fitting_inputs(model, configuration()) == ["input_ids:1x16:int64:112"]


def test_what_an_error_names_is_added():
    assert fitting_inputs(Sound(), configuration()) == ["input_values:1x16000:float32", "bbox:1x16x4:int64:1"]


def test_a_model_that_takes_something_else_has_no_inputs():
    assert fitting_inputs(Picky(), configuration()) == []


def test_the_model_and_random_numbers_stay_as_they_are():
    class Counts(Words):
        def forward(self, input_ids):
            self.calls = getattr(self, "calls", 0) + 1
            return self.words(input_ids) * torch.rand(4)

    model, before = Counts().train(), torch.get_rng_state()
    assert fitting_inputs(model, configuration())
    assert not hasattr(model, "calls") and model.training and torch.equal(before, torch.get_rng_state())
