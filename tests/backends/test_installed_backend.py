"""Backends of packages that are installed: a small one is, by pip, into a folder of the test."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "backends-for-a-test"
version = "1.0"

[project.entry-points."torchgraft.backends"]
shouting = "shouting_backend:Shouting"
no-backend = "shouting_backend:NoBackend"
broken = "shouting_backend_that_is_gone:Gone"
native = "shouting_backend:Shouting"

[tool.setuptools]
py-modules = ["shouting_backend"]
"""

MODULE = """
import torchgraft


class Shouting(torchgraft.Backend):
    name = "shouting"

    def supports(self, node):
        return node.target != "sort" or "nobody sorts here"

    def compile(self, part, inputs, options):
        return part.forward


class NoBackend:
    pass
"""

USE = """
import torch, torchgraft
from torchgraft.backends.auto import candidates
from torchgraft.backends.backend import backend_names, find_backend

def search(x):
    return torch.sin(torch.relu(x).sort().values)

x = torch.randn(4)
fast = torchgraft.lower(search, x, backend="shouting")
assert torch.equal(fast(x), search(x))
print(fast.explain().splitlines()[0])
print(type(find_backend("native")).__module__)
print({"shouting", "no-backend", "broken"} <= set(backend_names()))
print("shouting" in [backend.name for backend in candidates("cpu")])
print(*sorted(row["backend"] for row in torchgraft.lower(search, x, backend=["shouting", "native"]).choice.rows()))
for name in ("no-backend", "broken", "shoutin"):
    try:
        torchgraft.lower(search, x, backend=name)
    except torchgraft.BackendError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package is installed."""
    if importlib.util.find_spec("pip") is None or importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs pip and setuptools")
    source, target = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("installed")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "shouting_backend.py").write_text(MODULE)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*command, "--disable-pip-version-check", "--target", str(target), str(source)], check=True, capture_output=True
    )
    return target


def test_a_backend_of_an_installed_package_is_found(installed: Path) -> None:
    paths = [str(installed), str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    found = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[:5] == [
        "search for float32[4] on shouting: 2 of 4 calls, in 2 parts",
        "torchgraft.backends.native",  # a name of ours stays ours
        "True",
        "True",
        "eager native shouting",
    ]
    assert lines[5].startswith("the entry point 'no-backend' is no subclass of torchgraft.Backend")
    assert lines[6].startswith("the entry point 'broken' (shouting_backend_that_is_gone:Gone) cannot be loaded")
    assert lines[7] == "no backend is called 'shoutin'; did you mean 'shouting'?"
