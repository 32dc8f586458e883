"""Packages written by `to_folder`: read back in another process and in this one they must be the program that was written.
The programs are in `folder_programs.py`.
"""

import enum
import importlib
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchgraft as fx
from tests.codegen.folder_programs import (
    PROGRAMS,
    Color,
    Leaf,
    NestedAttributes,
    X,
    call_of,
    paint,
    program_with_plain_attributes,
    with_leaves,
)
from torchgraft import zoo

ROOT = Path(__file__).parents[2]

fx.wrap("paint")

ZOO = ("mlp", "resnet18", "transformer", "deep_recommender", "learning_to_paint")

LOADER = """
import importlib, sys, torch
folder = sys.argv[1]
sys.path.insert(0, folder)
torch.set_num_threads(1)
results = {}
for name, arguments in torch.load(f"{folder}/arguments.pt", weights_only=False).items():
    try:
        module = importlib.import_module(name).FxModule()
        torch.manual_seed(0)
        results[name] = (module(*arguments), module.state_dict())
    except Exception as error:
        results[name] = (repr(error), None)
torch.save(results, f"{folder}/results.pt")
"""


def run_python(text: str, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    subprocess.run([sys.executable, "-c", text, *arguments], check=True, env=environment, cwd=ROOT)


def forget(name: str) -> None:
    for module in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
        del sys.modules[module]


def load(folder: Path, class_name: str = "FxModule") -> nn.Module:
    """Import a package as `from <folder> import <class_name>` does, forgetting an earlier one of the same name."""
    forget(folder.name)
    sys.path.insert(0, str(folder.parent))
    try:
        return getattr(importlib.import_module(folder.name), class_name)()
    finally:
        sys.path.remove(str(folder.parent))
        forget(folder.name)


def facts(module: nn.Module) -> dict[str, Any]:
    """Everything about a module but the values of its tensors."""
    tied: dict[int, list[str]] = {}
    ordinary = [(path, part) for path, part in module.named_modules() if not isinstance(part, torch.jit.ScriptModule)]
    kept = [tensor for _, part in ordinary for tensor in (*part._parameters.values(), *part._buffers.values())]
    for path, part in ordinary:
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                tied.setdefault(id(tensor), []).append(f"{path}.{name}")
    assert kept is not None
    return {
        "state": [(name, value.dtype, tuple(value.shape)) for name, value in module.state_dict().items()],
        "parameters": [(name, p.requires_grad, p.dtype) for name, p in module.named_parameters()],
        "buffers": [(name, b.dtype) for name, b in module.named_buffers()],
        "modes": [(path, part.training) for path, part in ordinary],
        "tied": sorted(names for names in tied.values() if len(names) > 1),
    }


def same(found: Any, expected: Any) -> None:
    leaves, structure = pytree.tree_flatten(found)
    expected_leaves, expected_structure = pytree.tree_flatten(expected)
    assert structure == expected_structure
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        if isinstance(expected_leaf, torch.Tensor):
            torch.testing.assert_close(leaf, expected_leaf, rtol=0, atol=0, equal_nan=True)
        else:
            assert leaf == expected_leaf


class Written(NamedTuple):
    folder: Path
    module: fx.GraphModule
    arguments: tuple[Any, ...]
    state: dict[str, Any]
    expected: Any


class Packages:
    """Every program, written to one folder that is moved elsewhere afterwards."""

    def __init__(self, first: Path, place: Path) -> None:
        self.place = place
        self._written: dict[str, Written | Exception] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for name in PROGRAMS:
                try:
                    self._written[name] = self._write(name, first)
                except Exception as error:  # one program that fails must not hide the others
                    self._written[name] = error
        arguments = {
            f"package_{name}": item.arguments for name, item in self._written.items() if isinstance(item, Written)
        }
        torch.save(arguments, first / "arguments.pt")
        shutil.move(first, place)

    def _write(self, name: str, first: Path) -> Written:
        torch.manual_seed(0)
        module, arguments = PROGRAMS[name]()
        # Before running: layers such as spectral_norm change a little with every run.
        module.to_folder(first / f"package_{name}")
        state = {key: value.clone() for key, value in module.state_dict().items()}
        torch.manual_seed(0)
        return Written(self.place / f"package_{name}", module, arguments, state, module(*arguments))

    def __getitem__(self, name: str) -> Written:
        item = self._written[name]
        if isinstance(item, Exception):
            raise item
        return item


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("place") / "moved")


@pytest.fixture(scope="module")
def results_of_another_process(packages: Packages) -> dict[str, Any]:
    run_python(LOADER, str(packages.place))
    return torch.load(packages.place / "results.pt", weights_only=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_results_in_another_process(
    name: str, packages: Packages, results_of_another_process: dict[str, Any]
) -> None:
    written = packages[name]
    result, state = results_of_another_process[f"package_{name}"]
    same(result, written.expected)
    assert list(state) == list(written.module.state_dict())


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_module_in_this_process(name: str, packages: Packages) -> None:
    written = packages[name]
    random_state = torch.get_rng_state()
    loaded = load(written.folder)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert facts(loaded) == facts(written.module)
    same(dict(loaded.state_dict()), written.state)
    torch.manual_seed(0)
    same(loaded(*written.arguments), written.expected)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = fx.symbolic_trace(zoo.create(name).eval())
    arguments = zoo.example_inputs(name)
    module.to_folder(tmp_path / name)
    loaded = load(tmp_path / name)
    assert facts(loaded) == facts(module)
    with torch.no_grad():
        same(loaded(*arguments), module(*arguments))


def test_gradients_are_those_of_the_program(packages: Packages) -> None:
    written = packages["autograd_function"]
    gradients = []
    for module in (load(written.folder), written.module):
        x = X.clone().requires_grad_()
        module(x).sum().backward()
        gradients.append(x.grad)
    same(*gradients)


def test_training_reaches_every_name_of_a_tied_parameter(packages: Packages) -> None:
    loaded = load(packages["tied_to_leaf"].folder)
    with torch.no_grad():
        loaded.linear.weight.zero_()
    assert not loaded.leaf.inner.weight.any()
    assert loaded.again.leaf is loaded.leaf
    shared = load(packages["shared_with_leaf"].folder)
    assert shared.leaf.extra is shared.before
    assert shared.leaf.inner is shared.behind
    whole = load(packages["many_kinds"].folder).leaf
    assert whole.weights[0] is whole.inner.weight


def test_needs_no_torchgraft_unless_the_program_does(packages: Packages) -> None:
    folders = [packages[name].folder for name in ("odd_names", "tied", "regions", "bfloat16_eval")]
    run_python(
        "import importlib, sys\n"
        "sys.modules['torchgraft'] = None\n"
        "for name in sys.argv[2:]:\n"
        "    sys.path.insert(0, sys.argv[1])\n"
        "    importlib.import_module(name).FxModule()\n",
        str(folders[0].parent),
        *[folder.name for folder in folders],
    )


def test_loaded_programs_can_be_captured_scripted_and_pickled(packages: Packages, tmp_path: Path) -> None:
    written = packages["user_code"]
    again = fx.symbolic_trace(load(written.folder))
    assert [node.target for node in again.graph.nodes] == [node.target for node in written.module.graph.nodes]
    same(again(*written.arguments), written.expected)
    layers = packages["bfloat16_eval"]
    loaded = load(layers.folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        same(torch.jit.script(loaded)(*layers.arguments), layers.expected)


def test_values_can_be_sent_to_another_device(tmp_path: Path) -> None:
    fx.symbolic_trace(NestedAttributes()).to_folder(tmp_path / "elsewhere")
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module("elsewhere").FxModule(map_location="meta")
    finally:
        sys.path.remove(str(tmp_path))
        forget("elsewhere")
    assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"meta"}


# ---- files ----


def simple(function: Callable[..., Any] = torch.relu) -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: function(x))


def test_files_and_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    fx.symbolic_trace(model).to_folder(str(tmp_path / "a" / "b"), "Program")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["__init__.py", "a", "b", "module.py", "modules.pt"]
    assert (tmp_path / "a" / "b" / "__init__.py").read_text() == "from .module import *\n"
    assert type(load(tmp_path / "a" / "b", "Program")).__name__ == "Program"


def test_text_of_a_package(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval()
    fx.symbolic_trace(model).to_folder(tmp_path / "text")
    assert (tmp_path / "text" / "module.py").read_text() == TEXT


TEXT = '''\
"""The program FxModule, written by torchgraft: FxModule() builds it from the files beside this one."""

import os
import torch

__all__ = ["FxModule"]


def _load(name, map_location=None):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    return torch.load(path, map_location=map_location, weights_only=False)


def forward(self, input):
    input_1 = input
    _0 = getattr(self, "0")(input_1);  input_1 = None
    _1 = getattr(self, "1")(_0);  _0 = None
    return _1


class FxModule(torch.nn.Module):
    # (0): Linear(in_features=3, out_features=2, bias=True)
    # (1): ReLU()

    def __init__(self, map_location=None):
        super().__init__()
        vars(self).update(_load("modules.pt", map_location))

    forward = forward
'''


def test_writing_again_replaces_the_package_and_leaves_other_files_alone(tmp_path: Path) -> None:
    folder = tmp_path / "again"
    simple(torch.relu).to_folder(folder)
    (folder / "notes.txt").write_text("mine")
    same(load(folder)(X), X.relu())
    # The new source has the same length and perhaps the same time: bytecode of the first must not survive.
    simple(torch.tanh).to_folder(folder)
    same(load(folder)(X), X.tanh())
    assert (folder / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.rglob(".*"))


def test_a_failure_leaves_everything_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with pytest.raises(fx.GraphError):
        call_of(lambda x: x).to_folder(folder)
    assert not list(tmp_path.iterdir())
    simple().to_folder(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(fx.GraphError):
        call_of(lambda x: x).to_folder(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(FileExistsError, match="it is a file; choose another folder"):
        simple().to_folder(tmp_path / "taken")


# ---- refusals ----


def refusal(module: fx.GraphModule, tmp_path: Path, name: str = "FxModule") -> str:
    with pytest.raises(fx.GraphError) as caught:
        module.to_folder(tmp_path / "refused", name)
    return str(caught.value)


def test_a_local_function_cannot_be_imported(tmp_path: Path) -> None:
    def local(x: Any) -> Any:
        return x

    assert refusal(call_of(local), tmp_path) == (
        f"cannot write the program as a package: other programs cannot import '{__name__}.{local.__qualname__}'\n"
        "  node 'local' needs it, at an unknown line\n"
        "define it at the top level of an importable module, or replace the node"
    )


def test_a_refusal_names_the_line_of_the_user(tmp_path: Path) -> None:
    class Inner(enum.Enum):
        ONE = 1

    class Model(nn.Module):
        def forward(self, x):
            return paint(x, Inner.ONE)

    message = refusal(fx.symbolic_trace(Model()), tmp_path)
    assert f"needs it, at {__file__}:" in message
    assert '"return paint(x, Inner.ONE)"\ndefine it' in message


def test_what_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    class LocalLeaf(Leaf):
        pass

    message = refusal(with_leaves(nn.Sequential(LocalLeaf())[0:1]), tmp_path)
    assert message.startswith("cannot write the program as a package: its modules and tensors cannot be pickled\n")
    assert "LocalLeaf" in message
    module = program_with_plain_attributes()
    module.box = lambda: None
    assert "cannot be pickled" in refusal(module, tmp_path)


@pytest.mark.parametrize("name", ["class", "torch", "two words", "", "os"])
def test_names_that_no_class_can_have(name: str, tmp_path: Path) -> None:
    assert "choose a module_name that Python code can use" in refusal(simple(), tmp_path, name)


def test_a_name_that_the_code_needs(tmp_path: Path) -> None:
    assert "choose another module_name" in refusal(call_of(paint, Color.RED), tmp_path, "Color")
