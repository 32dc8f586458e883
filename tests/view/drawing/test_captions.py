"""How wide text is, and how it is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchgraft.view.drawing.captions import shortened, shortened_in_the_middle, text_width


def test_widths_are_those_of_the_font():
    assert text_width("", 12) == 0
    assert text_width("Ag1 ", 10) == pytest.approx(6.67 + 5.56 + 5.56 + 2.78)
    assert text_width("m", 10) > text_width("i", 10)
    assert text_width("abc", 10, bold=True) > text_width("abc", 10)
    assert text_width("程", 10) == 10


@given(st.text(max_size=80), st.floats(20, 300))
def test_what_is_cut_fits(text, width):
    for cut in (shortened, shortened_in_the_middle):
        result = cut(text, 10.0, width)
        assert text_width(result, 10.0) <= width + 0.001
        assert result == text or "…" in result or result == " ".join(text.split())


def test_what_fits_is_left_alone():
    assert shortened("conv1", 12, 100) == "conv1"
    assert shortened_in_the_middle("conv1", 12, 100) == "conv1"


def test_both_ends_of_a_path_stay():
    result = shortened_in_the_middle("encoder.layers.11.attention.output.weight", 10, 120)
    assert result.startswith("encoder.") and result.endswith(".weight")
