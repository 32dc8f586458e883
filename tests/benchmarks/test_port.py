"""How a package that was written for torch.fx is ported: its imports and nothing else."""

import textwrap

import pytest

from benchmarks.clients.port import port_package, port_text

PORTED = {
    "import torch.fx": "import torch, torchgraft",
    "import torch.fx as fx": "import torchgraft as fx",
    "import torch.fx.traceback as tb": "import torchgraft.traceback as tb",
    "import os, torch.fx.node": "import os; import torch, torchgraft.node",
    "from torch import fx": "import torchgraft as fx",
    "from torch import fx as f, nn": "import torchgraft as f; from torch import nn",
    "from torch import (\n    nn,\n    fx,\n)": "import torchgraft as fx; from torch import nn",
    "from torch.fx import Graph, Node as N": "from torchgraft import Graph; from torchgraft import Node as N",
    "from torch.fx.passes.shape_prop import ShapeProp": "from torchgraft.passes.shape_prop import ShapeProp",
    "from torch.fx.experimental.proxy_tensor import make_fx": "from torch.fx.experimental.proxy_tensor import make_fx",
    "import torch": "import torch",
    "from .fx import thing": "from .fx import thing",
    "x = 'torch.fx'": "x = 'torch.fx'",
    "# torch.fx": "# torch.fx",
}


@pytest.mark.parametrize("text", PORTED)
def test_statements(text):
    assert port_text(text) == PORTED[text]


def test_attributes_need_an_import():
    text = '''\
    """About torch.fx."""
    from __future__ import annotations
    import torch

    def function(x: torch.fx.Node) -> "torch.fx.Node":
        return torch.fx.experimental.symbolic_shapes.free_symbols(torch.fx.wrap(x))
    '''
    expected = '''\
    """About torch.fx."""
    from __future__ import annotations
    import torchgraft
    import torch

    def function(x: torchgraft.Node) -> "torch.fx.Node":
        return torch.fx.experimental.symbolic_shapes.free_symbols(torchgraft.wrap(x))
    '''
    assert port_text(textwrap.dedent(text)) == textwrap.dedent(expected)


def test_other_names_may_change_too():
    names = {"torch.fx": "torchgraft", "torch.ao.quantization": "ao.quantization"}
    text = (
        "from torch.ao.quantization import QConfig\nfrom torch.ao.nn import qat\nfrom torch.ao import quantization as q"
    )
    expected = "from ao.quantization import QConfig\nfrom torch.ao.nn import qat\nimport ao.quantization as q"
    assert port_text(text, names) == expected


def test_a_package_is_copied_with_everything_in_it(tmp_path):
    source = tmp_path / "package"
    (source / "inner").mkdir(parents=True)
    (source / "__init__.py").write_text("from torch import fx\n")
    (source / "inner" / "plain.py").write_text("import torch\n")
    (source / "data.txt").write_text("torch.fx")
    target = tmp_path / "ported"
    assert port_package(source, target) == 1
    assert (target / "__init__.py").read_text() == "import torchgraft as fx\n"
    assert (target / "inner" / "plain.py").read_text() == "import torch\n" and (
        target / "data.txt"
    ).read_text() == "torch.fx"
