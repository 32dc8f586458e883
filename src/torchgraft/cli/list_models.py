"""`graft models [FILTER]`: the models that can be named on the command line, of the zoo and of the libraries that are installed.
How a name becomes a model is in `models.py` and `libraries.py`.
"""

from __future__ import annotations

import argparse
import fnmatch

from torchgraft.cli.programs import add_json, json_text

NAME = "models"
SUMMARY = "list the models that can be named: of the zoo, torchvision, timm and transformers (hf)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "filter",
        nargs="?",
        metavar="FILTER",
        help="only names with this in them, or of this pattern, such as resnet, 'timm:*vit*' or hf: "
        "(default: the zoo, and how many the others have)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the names; a filter that fits none fails."""
    from torchgraft.cli.libraries import LIBRARIES, PACKAGES, known_names
    from torchgraft.errors import GraftError
    from torchgraft.results.progress import stage

    found: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    libraries = ["zoo", *LIBRARIES]
    for number, library in enumerate(libraries, 1):
        try:
            with stage(f"asking {PACKAGES.get(library, library)}", number, len(libraries)):
                names = [f"{library}:{name}" for name in known_names(library)]
        except GraftError as error:
            missing[library] = str(error)
        else:
            found[library] = [name for name in names if fits(name, arguments.filter)]
    if arguments.json:
        print(json_text({"models": found, "missing": missing}))
    else:
        print("\n".join(_lines(found, missing, arguments.filter)))
    return 0 if any(found.values()) else 1


def fits(name: str, text: str | None) -> bool:
    """Whether a name has the text in it, or is of its pattern.

    >>> fits("zoo:resnet50", "net5"), fits("zoo:resnet50", "resnet*"), fits("zoo:resnet50", "vit*"), fits("zoo:mlp", None)
    (True, True, False, True)
    """
    if text is None:
        return True
    text, name = text.lower(), name.lower()
    if any(character in text for character in "*?["):
        return fnmatch.fnmatchcase(name, text) or fnmatch.fnmatchcase(name.partition(":")[2], text)
    return text in name


def _lines(found: dict[str, list[str]], missing: dict[str, str], text: str | None) -> list[str]:
    from torchgraft.results.tables import count

    lines = []
    for library, names in found.items():
        if text is not None or library == "zoo":
            lines += names
        elif names:
            lines.append(
                f"{library}: {count(len(names), 'model')}, such as {names[0]}; list them with: graft models {library}:"
            )
    if text is not None and not lines:
        lines.append(f"no model has {text!r} in its name")
    lines += [f"{library}: none, {'; '.join(reason.splitlines())}" for library, reason in missing.items()]
    if text is None:
        lines.append("your own: PATH/FILE.py:NAME, PACKAGE.MODULE:NAME, FILE.pt2 or FILE.pt")
    return lines
