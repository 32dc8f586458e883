"""The script of docs/distributed.md, started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = """
import torch, torchgraft
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())])
batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(3)]
expected, optimizer = [], torch.optim.SGD(net.parameters(), lr=0.1)
before = {name: value.clone() for name, value in net.state_dict().items()}
for x, target in batches:
    optimizer.zero_grad()
    parts = [nn.functional.mse_loss(net(part), wanted) for part, wanted in zip(x.chunk(4), target.chunk(4))]
    (sum(parts) / 4).backward()
    optimizer.step()
    expected.append(float(sum(parts)) / 4)
net.load_state_dict(before)

torch.distributed.init_process_group("gloo")
plan = torchgraft.distributed.pipeline(net, torch.randn(2, 8), stages=torch.distributed.get_world_size())
run = plan.schedule("1f1b", microbatches=4, loss=nn.functional.mse_loss)
optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
found = []
for x, target in batches:
    optimizer.zero_grad()
    output, losses = run.step(x, target=target)
    optimizer.step()
    if losses:
        found.append(float(sum(losses)) / 4)
if found:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    print("the losses of one process")
torch.distributed.destroy_process_group()
"""


def test_a_script_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script)]
    folders = os.pathsep.join(filter(None, [*map(os.path.abspath, filter(None, sys.path))]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": folders}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("the losses of one process") == 1
