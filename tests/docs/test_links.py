"""The links of the pages that are not part of the site (README, CONTRIBUTING, CHANGELOG): each leads to a file and a heading.
Those inside docs/ are checked when `make docs` builds the site.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(path: Path) -> set[str]:
    """The headings of a page, as GitHub and MkDocs name them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    result = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if not link.startswith("https://"):
            target, _, anchor = link.partition("#")
            path = page.parent / target if target else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                result.append(link)
    return result


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_leads_somewhere(name: str) -> None:
    assert broken(ROOT / name) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, here\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-heading-here) [b](other.md#nowhere) [c](missing.md)", encoding="utf-8")
    assert broken(page) == ["other.md#nowhere", "missing.md"]
