"""The examples of docs/recording.md, run as they stand; only times may differ."""

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "recording.md"


class AnyTime(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        want, got = (re.sub(r"[\d.]+ [µm]?s\b", "a while", text) for text in (want, got))
        return super().check_output(want, got, optionflags)


def test_the_examples_of_the_page_are_right() -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(PAGE.read_text(encoding="utf-8"), {}, PAGE.name, str(PAGE), 0)
    found = doctest.DocTestRunner(AnyTime(), optionflags=flags).run(test)
    assert found.attempted > 10 and found.failed == 0
