"""Checks what `python -m build` left in dist/: that nothing is missing, and that the wheel works where nothing else is installed.
torch and the other dependencies are lent by the environment this runs in, so that nothing is downloaded.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / "build" / "package"
SMALL_CAPTURE = """
import pathlib, sys, torch, torchgraft
assert pathlib.Path(torchgraft.__file__).is_relative_to(sys.prefix), f"not the installed package: {torchgraft.__file__}"
model, x = torchgraft.zoo.create("mlp"), torch.randn(2, 16)
assert torchgraft.capture(model, x).verify(model, x).ok
"""


def files_below(folder: Path) -> set[str]:
    """The files of a folder as an archive names them, without what Python and editors leave behind."""
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder.parent).as_posix() for path in found if path.suffix != ".pyc"}


def require(expected: set[str], found: set[str], archive: Path) -> None:
    if missing := sorted(expected - found):
        sys.exit(f"{archive.name} lacks {len(missing)} files:\n  " + "\n  ".join(missing[:20]))


def main() -> None:
    [wheel], [sources] = (ROOT / "dist").glob("*.whl"), (ROOT / "dist").glob("*.tar.gz")
    require(files_below(ROOT / "src" / "torchgraft"), set(zipfile.ZipFile(wheel).namelist()), wheel)
    metadata = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    described = zipfile.ZipFile(wheel).read(metadata).decode()
    if broken := re.findall(r"\]\((?!https?:|#)[^)]*\)", described):
        sys.exit(f"links that lead nowhere on PyPI: {broken[:5]}; see setup.py")
    with tarfile.open(sources) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "constraints.txt",
        "mkdocs.yml",
        "setup.py",
    }
    require(expected.union(*(files_below(ROOT / folder) for folder in ("docs", "tests"))), packed, sources)

    venv.create(ENVIRONMENT, clear=True, with_pip=False)
    python = ENVIRONMENT / "bin" / "python"
    target = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
    install = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "--python",
        str(python),
        "install",
    ]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}

    def run(*command: str) -> None:
        subprocess.run(command, check=True, cwd=ENVIRONMENT, env=clean, stdout=subprocess.DEVNULL)

    # Help comes at once, so it may need nothing that is slow to import: here is nothing to import yet.
    graft = str(ENVIRONMENT / "bin" / "graft")
    run(graft, "--help")
    run(graft, "--version")
    # A .pth file lends the packages; those of the lender's own .pth files, its editable torchgraft among them, are not read.
    lent = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_paths()["purelib"]]
    (target / "lent.pth").write_text("\n".join(lent), encoding="utf-8")
    run(str(python), "-W", "error::UserWarning", "-c", SMALL_CAPTURE)
    run(graft, "show", "zoo:mlp", "--level", "core_aten")
    print(f"{wheel.name} and {sources.name} are complete; the wheel runs in an environment of its own")


if __name__ == "__main__":
    main()
