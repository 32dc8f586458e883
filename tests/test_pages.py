"""The pages that show whole programs: their code runs in order, and prints what stands below it.
Pages written as dialogues are tested beside what they tell about (`test_documentation.py`, `test_looking_page.py`).
"""

import contextlib
import io
import linecache
import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def steps(page: str) -> list[tuple[str, str | None]]:
    """Each piece of code of a page, and the text right below it."""
    found = list(BLOCK.finditer(page))
    result = []
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block[1] == "python":
            is_output = after is not None and after[1] == "" and not page[block.end() : after.start()].strip()
            result.append((block[2], after[2] if is_output and after is not None else None))
    return result


def comparable(text: str) -> str:
    """Without file names, which the reader chooses, and without times."""
    text = re.sub(r"[^\s(\"]+\.py:", "", text)
    return " ".join(re.sub(r"\d+\.\d+", "0", text).split())


def run_page(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(folder)
    file, space = str(folder / "example.py"), {"__name__": "__main__"}
    source = "".join(code for code, _ in steps(text))
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    line, compared = 0, 0
    for code, expected in steps(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile("\n" * line + code, file, "exec"), space)
        line += code.count("\n")
        if expected is not None and "print(" in code:
            compared += 1
            assert comparable(printed.getvalue()) == comparable(expected)
    del linecache.cache[file]
    return compared


@pytest.mark.parametrize(
    ("page", "outputs"), [("capture", 4), ("drawing", 0), ("passes", 1), ("rewriting", 1), ("splitting", 2)]
)
def test_the_code_of_a_page_prints_what_stands_below_it(
    page: str, outputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert run_page(text, tmp_path, monkeypatch) == outputs


def test_the_first_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On smaller images, which take less time."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("224, 224", "64, 64").replace("160, 160", "48, 48")
    assert run_page(text, tmp_path, monkeypatch) == 1
    assert (tmp_path / "resnet50.svg").stat().st_size > 10_000


def test_what_the_first_page_says_is_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    space: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(steps(text)[0][0], "model.py", "exec"), space)
    table = text.partition("| next | |")[2].partition("\n\n")[0]
    lines = re.findall(r"`([^`]+)`", table)
    assert len(lines) == 13
    for line in lines:
        # The default backend compiles C++, which takes longer than everything else.
        exec(line.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"'), space)
    assert (tmp_path / "net.svg").exists() and (tmp_path / "net" / "__init__.py").exists()
