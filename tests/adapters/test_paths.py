"""The import paths themselves: every form of import works and gives one module, classes pickle, nothing else is answered for."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

import torchgraft
from torchgraft.fx_passes.paths import HOMES, install


@pytest.mark.parametrize("path", HOMES)
def test_every_path_leads_home(path: str) -> None:
    module = importlib.import_module(f"torchgraft.{path}")
    assert module is importlib.import_module(f"torchgraft.{HOMES[path]}")
    assert module.__name__ == f"torchgraft.{HOMES[path]}"
    importlib.import_module(f"torch.fx.{path}")  # there is such a path in torch.fx


def test_forms_of_import() -> None:
    code = (
        "import torchgraft.passes.infra.partitioner\n"
        "import torchgraft.passes.split_module as a\n"
        "from torchgraft.passes.split_module import split_module\n"
        "from torchgraft.passes import split_module as b\n"
        "from torchgraft.experimental import const_fold\n"
        "import torchgraft.experimental.optimization as o\n"
        "assert a.split_module is split_module is b.split_module is torchgraft.split_module\n"
        "assert torchgraft.passes.infra.partitioner.CapabilityBasedPartitioner.__name__ == 'CapabilityBasedPartitioner'\n"
        "assert torchgraft.experimental.optimization is o\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_else_is_found() -> None:
    for path in (
        "torchgraft.passes.no_such_pass",
        "torchgraft.experimental.no_such_thing",
        "torchgraft.passes.infra.other",
    ):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(path)


def test_importing_torchgraft_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, torchgraft; assert 'torch' not in sys.modules"], check=True)


def test_installed_once() -> None:
    count = len(sys.meta_path)
    install()
    assert len(sys.meta_path) == count


def test_classes_pickle() -> None:
    from torchgraft.passes.infra.pass_base import PassResult  # type: ignore[import-not-found]
    from torchgraft.passes.operator_support import OperatorSupport  # type: ignore[import-not-found]

    assert pickle.loads(pickle.dumps(PassResult(1, True))) == PassResult(1, True)
    assert pickle.loads(pickle.dumps(OperatorSupport({"torch.relu": None})))._support_dict == {"torch.relu": None}
    assert torchgraft.passes is not None
