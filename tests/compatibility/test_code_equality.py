"""Byte for byte: the code and the printed graph that torchgraft generates are those torch.fx generates.

The programs compared are in programs and networks; torch.fx itself says what is right.
"""

import importlib
import re
from types import ModuleType

import pytest
import torch
from torch.utils import _pytree as pytree

from .networks import NETWORKS
from .programs import PROGRAMS, Program

torch_fx = importlib.import_module("torch.fx")


@pytest.mark.parametrize("build", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_code_of_a_program(graft: ModuleType, build: Program) -> None:
    theirs = build(torch_fx).code.replace("typing_Union[int,NoneType]", "int|NoneType")  # so in torch 2.15
    assert without_wrap_statements(build(graft).code) == without_wrap_statements(theirs)


@pytest.mark.parametrize("build", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_text_of_a_graph(graft: ModuleType, build: Program) -> None:
    assert without_addresses(str(build(graft).graph)) == without_addresses(str(build(torch_fx).graph))


def without_wrap_statements(code: str) -> str:
    """Leaf functions are announced above ``forward`` by the name of the library that honours them."""
    return re.sub(r'^\S*wrap\S*\("\w+"\)$', "WRAP", code, flags=re.MULTILINE)


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize("name", NETWORKS)
def test_code_of_a_network(graft: ModuleType, name: str) -> None:
    make, _ = NETWORKS[name]
    model = make()
    assert graft.symbolic_trace(model).code == torch_fx.symbolic_trace(model).code


@pytest.mark.parametrize("name", NETWORKS)
def test_code_of_a_network_traced_through(graft: ModuleType, name: str) -> None:
    if name == "recurrent":
        pytest.skip("an LSTM is a leaf: its forward branches on values")
    if name == "residual":
        pytest.skip("`y += x` stays in place where nothing proves that the types of y and x agree")
    codes = []
    for library in (graft, torch_fx):

        class Through(library.Tracer):
            def is_leaf_module(self, m, module_qualified_name):
                return type(m).__name__ == "BatchNorm2d"

        make, _ = NETWORKS[name]
        model = make()
        codes.append(library.GraphModule(model, Through().trace(model)).code)
    assert codes[0] == codes[1]


@pytest.mark.parametrize("name", NETWORKS)
def test_network_computes_what_eager_computes(fx: ModuleType, name: str) -> None:
    make, inputs = NETWORKS[name]
    model = make().eval()
    arguments = inputs()
    expected = pytree.tree_leaves(model(*arguments))
    traced = fx.symbolic_trace(model)
    traced.graph.lint()
    for answer in (traced(*arguments), fx.Interpreter(traced).run(*arguments)):
        assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(answer), expected, strict=True))


def test_code_of_flattened_inputs(graft: ModuleType) -> None:
    def forward(batch, scale):
        image, (first, second) = batch["image"], batch["pair"]
        return {"out": [image * scale + first, second]}

    codes = []
    for library in (graft, torch_fx):
        structure = {"image": library.PH, "pair": (library.PH, library.PH)}
        code = library.symbolic_trace(forward, concrete_args={"batch": structure}).code
        codes.append(re.sub(r"\S+\(\[batch, scale\]", "FLATTEN([batch, scale]", code))
    assert codes[0] == codes[1]


def test_source_with_another_root_name(graft: ModuleType) -> None:
    model = NETWORKS["residual"][0]()
    sources = [library.symbolic_trace(model).graph.python_code("root").src for library in (graft, torch_fx)]
    assert sources[0] == sources[1]


def test_globals_of_the_code(graft: ModuleType) -> None:
    for name in (
        "leaf_functions_of_this_file",
        "typing_annotations",
        "enumeration_arguments",
        "annotations_of_classes",
    ):
        ours, theirs = (PROGRAMS[name](library).graph.python_code("self").globals for library in (graft, torch_fx))
        own = {"fx_pytree", "wrap"}
        assert {k: v for k, v in theirs.items() if k not in own}.items() <= ours.items()
