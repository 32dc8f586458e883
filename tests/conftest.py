"""Settings for every test: hypothesis profiles, the number of threads, and which tests this machine cannot run.
Fixtures live beside the tests that use them.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# A first call into torch can take seconds, so no example is failed for being slow. The examples are the same in every run,
# so that a failure is the fault of the change at hand; `HYPOTHESIS_PROFILE=thorough` looks for new ones.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("thorough", settings.get_profile("default"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Sums are split between threads, so their last bits depend on how many there are.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Which tests ran before in the same process is a matter of chance, and must not be what a failure depends on.
    torch.manual_seed(0)
