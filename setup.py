"""The text about torchgraft that PyPI shows: the README, without the links and the picture that lead somewhere in the repository
only. Everything else about the package is in `pyproject.toml`.
"""

import re
from pathlib import Path

from setuptools import setup

ADDRESS = ""  # where the files of the repository can be read, with a slash at the end, as soon as there is such a place


def for_pypi(text: str) -> str:
    """Relative links lead nowhere on PyPI: they get the address, or, while there is none, are left as words."""
    relative = r"\]\((?!https?:|#|mailto:)([^)\s]+)\)"
    if ADDRESS:
        return re.sub(relative, rf"]({ADDRESS}\1)", text)
    text = re.sub(rf"^!\[[^\]]*{relative}\n+", "", text, flags=re.MULTILINE)
    return re.sub(rf"\[([^\]]*){relative}", r"\1", text)


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=for_pypi(readme), long_description_content_type="text/markdown")
