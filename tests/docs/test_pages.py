"""The pages in docs/ and the README: their Python runs from top to bottom, and prints what stands below it.
What the pages explain is tested where it lives; here only the pages are. To write the outputs of a page anew:

    python -m tests.docs.test_pages docs/guide.md
"""

import contextlib
import doctest
import io
import itertools
import linecache
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

from torchgraft.analysis.cost.formulas import FORMULAS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Written by programs (tables of measurements), or made of docstrings, which are tested where they stand.
WRITTEN_BY_PROGRAMS = {"benchmarks", "clients", "coverage", "changelog", "quantized_models"}
# Operators and what they are given differ a little in every torch.
SHOWS_OPERATORS = {"looking", "levels", "jobs/inspect_and_draw", "jobs/training_graph"}


def pages() -> list[str]:
    names = [path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    return sorted(name for name in names if name not in WRITTEN_BY_PROGRAMS and not name.startswith("reference"))


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def steps(page: str) -> list[tuple[str, re.Match[str] | None]]:
    """Each piece of code of a page, and the block right below it, if that is what the code prints."""
    found = list(BLOCK.finditer(page))
    result = []
    for block, after in itertools.zip_longest(found, found[1:]):
        if block[1] == "python":
            below = after is not None and after[1] in ("", "text") and not page[block.end() : after.start()].strip()
            result.append((block[2], after if below and re.search(r"\bprint\w*\(", block[2]) else None))
    return result


def comparable(text: str) -> str:
    """Without file names, which the reader chooses, and without times."""
    text = re.sub(r"[^\s(\"]+\.py\b:?", "", text)
    text = re.sub(r"[\d.]+ [µm]?s\b", "a while", text)
    return " ".join(re.sub(r"\d+\.\d+", "0", text).split())


def printed_by(text: str, folder: Path) -> list[tuple[str, re.Match[str]]]:
    """What the code of a page prints, with the block in which the page says so."""
    file, space = str(folder / "example.py"), {"__name__": "__main__"}
    source = "".join(code for code, _ in steps(text))
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    line, result = 0, []
    for code, expected in steps(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile("\n" * line + code, file, "exec"), space)
        line += code.count("\n")
        if expected is not None:
            result.append((printed.getvalue(), expected))
    del linecache.cache[file]
    return result


def run_page(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a page and compare what it prints; the number of comparisons."""
    monkeypatch.chdir(folder)
    found = printed_by(text, folder)
    for printed, expected in found:
        assert comparable(printed) == comparable(expected[2])
    return len(found)


class AnyTime(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        want, got = (re.sub(r"[\d.]+ [µm]?s\b", "a while", text) for text in (want, got))
        return super().check_output(want, got, optionflags)


def run_dialogue(page: str) -> doctest.TestResults:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(text_of(page), {}, page, f"docs/{page}.md", 0)
    before = dict(FORMULAS)
    try:
        return doctest.DocTestRunner(AnyTime(), optionflags=flags).run(test)
    finally:
        FORMULAS.clear()
        FORMULAS.update(before)


@pytest.mark.parametrize("page", pages())
def test_the_code_of_a_page_prints_what_stands_below_it(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(page)
    if page in SHOWS_OPERATORS and not torch.__version__.startswith("2.13."):
        pytest.skip("operators differ a little in every torch")
    if "```python\n>>> " in text:
        found = run_dialogue(page)
        assert found.attempted > 10 and found.failed == 0
    elif not steps(text):
        assert page in {"README", "command_line", "design"}, "a page without code that runs"
    else:
        run_page(text, tmp_path, monkeypatch)


def test_pages_show_what_they_print() -> None:
    """Most pages have outputs that are compared, so that a change of the pattern above cannot leave them out unnoticed."""
    shown = {page: sum(expected is not None for _, expected in steps(text_of(page))) for page in pages()}
    assert sum(shown.values()) >= 40, shown


def test_the_first_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert run_page(text, tmp_path, monkeypatch) == 1


def test_what_the_first_page_says_is_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    space: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(steps(text)[0][0], "model.py", "exec"), space)
    table = text.partition("| next | |")[2].partition("\n\n")[0]
    lines = re.findall(r"`([^`]+)`", table)
    assert len(lines) == 17
    for line in lines:
        # The default backend compiles C++, which takes longer than everything else.
        exec(line.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"'), space)
    assert (tmp_path / "net.svg").exists() and (tmp_path / "net" / "__init__.py").exists()


def write_anew(path: Path, folder: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for printed, block in reversed(printed_by(text, folder)):
        printed = re.sub(r"\S*/(torchgraft/[\w/]+\.py)", r"\1", printed).replace(f"{folder}/example.py", "model.py")
        printed = re.sub(r"\n\s*\n\s*\n", "\n\n", printed.strip("\n").rstrip()) + "\n"
        printed = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
        text = f"{text[: block.start(2)]}{printed}{text[block.end(2) :]}"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    import os
    import tempfile

    paths = [Path(argument).resolve() for argument in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        for path in paths:
            write_anew(path, Path(name))
