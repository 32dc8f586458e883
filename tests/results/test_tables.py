"""Tables: aligned text, escaped HTML, valid JSON."""

from __future__ import annotations

import json

from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table


class Result(Tabular):
    def _table(self) -> Table:
        cells = [("a<b>", "1"), ("a longer one\nin two lines", "22.5")]
        return Table("title", ("name", "n"), cells, frozenset(["n"]), frozenset([1]), "footer")

    def rows(self):
        return [{"value": float("nan"), "type": int}]


def test_text() -> None:
    width = len("a longer one in two lines")
    assert str(Result()).splitlines() == [
        "title",
        "name".ljust(width) + "     n",
        "a<b>".ljust(width) + "     1",
        "a longer one in two lines  22.5",
        "footer",
    ]


def test_long_cells_are_cut() -> None:
    line = Table("", ("name",), [("x" * 500,)]).text().splitlines()[1]
    assert len(line) == 64 and line.endswith("…")


def test_html() -> None:
    page = Result()._repr_html_()
    assert "a&lt;b&gt;" in page and "<caption>title</caption>" in page and "<p>footer</p>" in page
    long = Table("", ("n",), [(str(number),) for number in range(1000)]).html()
    assert "and 600 more rows" in long


def test_json(tmp_path) -> None:
    text = Result().to_json(tmp_path / "a.json")
    assert json.loads(text) == {"rows": [{"value": "nan", "type": "<class 'int'>"}]}
    assert (tmp_path / "a.json").read_text().strip() == text


def test_colours_only_where_they_are_wanted() -> None:
    lines = Result().text(color=True).splitlines()
    assert lines[1].startswith("\033[1mname") and lines[3].startswith("\033[31ma longer one") and "\033" not in lines[2]
    assert Result().text() == str(Result()) and repr(Result()) == "<Result: title>" and "\033" not in str(Result())
