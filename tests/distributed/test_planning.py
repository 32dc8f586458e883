"""A model that fits on no machine here is planned for several, within the time and the memory that are promised."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_seventy_billion_parameters() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.planning"]
    environment = {"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Llama in 8 stages" in done.stdout
    assert "70.6 billion parameters" in done.stdout
    memory = re.search(r"and ([\d.]+) GB at most", done.stdout)
    assert memory is not None
    assert float(memory[1]) < 4
