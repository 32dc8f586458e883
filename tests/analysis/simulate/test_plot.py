"""Plots are well-formed whatever the numbers are, and keep what they show inside of their panels."""

import re
import xml.etree.ElementTree as ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from torchgraft.analysis.simulate.plot import _HEIGHT, _WIDTH, Panel, panels_svg

POINTS = st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-12, 1e18)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(series=st.dictionaries(st.text(max_size=8).filter(str.isprintable), POINTS, max_size=4), count=st.integers(1, 5))
def test_any_numbers(series, count):
    text = panels_svg("<&>", "x", [Panel("a", series, str)] * count)
    ElementTree.fromstring(text)
    for x, y in re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', text):
        assert 0 <= float(x) <= _WIDTH and 0 <= float(y) <= _HEIGHT


def test_what_is_zero_has_no_point():
    text = panels_svg("a", "x", [Panel("a", {"b": [(1, 0.0), (2, 0.0)]}, str)])
    assert "nothing to show" in text and "<circle" not in text


def test_axes_have_round_numbers():
    text = panels_svg("a", "batch", [Panel("a", {"b": [(1, 0.001), (8, 0.004)]}, "{:g}".format)])
    assert ">0.001<" in text and ">0.002<" in text and ">8<" in text and ">batch<" in text
