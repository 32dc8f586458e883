"""Types as a user sees them: `mypy --strict` accepts a file that uses the public names, and knows each of them.
What mypy says about the library itself is `make types`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchgraft

ROOT = Path(__file__).parents[2]
USER = Path(__file__).with_name("user.py")


@pytest.mark.slow
def test_a_users_file_is_right_under_strict(tmp_path: Path) -> None:
    names = tmp_path / "names.py"
    uses = [f"print(torchgraft.{name})" for name in torchgraft.__all__]
    names.write_text("\n".join(["import torchgraft", *uses]) + "\n", encoding="utf-8")
    options = ["--config-file=", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path / 'cache'}"]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mypy", *options, str(USER), str(names)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_users_file_runs(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("user", USER)
    assert spec is not None and spec.loader is not None
    user = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(user)
    user.main(tmp_path)
    assert (tmp_path / "net.svg").exists() and (tmp_path / "net.json").exists()
