"""Colours."""

import pytest
import torch

import torchgraft
from torchgraft.view.drawing.labels import KINDS
from torchgraft.view.drawing.theme import DARK, LIGHT, style_sheet


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, two):
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_words_can_be_read(palette):
    assert set(palette.kinds) == set(KINDS)
    for kind, (fill, _, words) in palette.kinds.items():
        assert contrast(fill, words) >= 4.5, kind
    assert contrast(palette.paper, palette.ink) >= 7
    for ground in (palette.paper, palette.frame, palette.backward_frame):
        assert contrast(ground, palette.quiet) >= 4.4
        assert contrast(ground, palette.line) >= 2.4


def test_themes():
    program = torchgraft.symbolic_trace(torch.nn.ReLU())
    assert "prefers-color-scheme" in torchgraft.draw(program).svg
    assert "prefers-color-scheme" not in torchgraft.draw(program, theme="light").svg
    assert DARK.paper in torchgraft.draw(program, theme="dark").svg
    assert DARK.paper not in torchgraft.draw(program, theme="light").svg


def test_an_unknown_theme_is_refused():
    with pytest.raises(
        torchgraft.GraftError, match="cannot draw in the theme 'pink': it is not known\nuse one of 'auto', 'light'"
    ):
        torchgraft.draw(torchgraft.symbolic_trace(torch.nn.ReLU()), theme="pink")


def test_every_rule_is_of_this_drawing_alone():
    rules = [
        line for line in style_sheet("auto", ".graft-auto").splitlines() if "{" in line and not line.startswith("@")
    ]
    assert all(part.strip().startswith(".graft-auto ") for rule in rules for part in rule.split("{")[0].split(","))
