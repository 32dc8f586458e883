"""The notebooks in docs/notebooks: their code runs from top to bottom, and ends with what they say about it.
`make docs` runs them in a kernel, as a reader does, and shows what they show.
"""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def cells(name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_code_of_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"]  # type: ignore[arg-type]
    assert any("assert" in text for text in code), "a notebook checks what it claims"
    space: dict[str, object] = {"__name__": "__main__"}
    for text in code:
        exec(compile(text, f"{name}.ipynb", "exec"), space)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_kept_without_outputs(name: str) -> None:
    """They are made anew with the site, so that they cannot be of yesterday."""
    assert [cell for cell in cells(name) if cell.get("outputs")] == []
