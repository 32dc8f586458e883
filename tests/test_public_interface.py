"""The public names: that each resolves and is documented, and a list of them with their signatures that changes on purpose only.

The list is `tests/golden/public_names.txt`. To change it, look at what has become different, then write it anew:

    python -m tests.test_public_interface
"""

import difflib
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchgraft

GOLDEN = Path(__file__).parent / "golden" / "public_names.txt"
COMMAND = "python -m tests.test_public_interface"

SURFACE = """
    symbolic_trace Tracer TracerBase Proxy ParameterProxy Attribute Graph Node GraphModule CodeGen Interpreter Transformer
    replace_pattern replace_pattern_with_filters subgraph_rewriter Match ReplacedPatterns wrap PH ProxyableClassMeta map_arg
    map_aggregate has_side_effect immutable_list immutable_dict TraceError
""".split()

MEMBERS = {
    "Graph": """
        call_function call_method call_module create_node eliminate_dead_code erase_node find_nodes get_attr graph_copy
        inserting_after inserting_before lint node_copy nodes on_generate_code output output_node owning_module placeholder
        print_tabular process_inputs process_outputs python_code set_codegen
    """,
    "Node": """
        all_input_nodes append args format_node insert_arg is_impure kwargs meta name next normalized_arguments op prepend prev
        replace_all_uses_with replace_input_with stack_trace target type update_arg update_kwarg users
    """,
    "GraphModule": """
        add_submodule code delete_all_unused_submodules delete_submodule graph print_readable recompile to_folder
    """,
    "Tracer": """
        call_module create_arg create_args_for_root create_node create_proxy get_fresh_qualname getattr is_leaf_module iter keys
        path_of_module proxy to_bool trace
    """,
    "Interpreter": """
        boxed_run call_function call_method call_module fetch_args_kwargs_from_env fetch_attr get_attr map_nodes_to_values output
        placeholder run run_node
    """,
    "Transformer": "transform",
    "CodeGen": "additional_globals gen_fn_def generate_output process_inputs process_outputs",
}

# Names of torch.fx's classes that have no meaning here: they make nodes for torch.compile's symbolic sizes.
ABSENT = {
    "Graph": {
        "create_size_node",
        "create_storage_offset_node",
        "create_stride_node",
        "materialize_symint",
        "materialize_symints",
    }
}


def public_members(cls: type) -> dict[str, Any]:
    """What a class defines itself."""
    return {
        name: member
        for name, member in vars(cls).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod | staticmethod))
    }


def function_of(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


# ---- the golden list ----


class Shown(str):
    """A text that a signature prints as it is."""

    def __repr__(self) -> str:
        return str(self)


def default_text(value: Any) -> Shown:
    """A default value, without what differs from machine to machine."""
    if isinstance(value, ModuleType):
        return Shown(value.__name__)
    if isinstance(value, tuple):
        return Shown(f"({', '.join(map(default_text, value))}{',' * (len(value) == 1)})")
    if inspect.isroutine(value):
        return Shown(value.__name__)
    return Shown(f"<{type(value).__name__}>" if " at 0x" in repr(value) else repr(value))


def signature_text(function: Any) -> str:
    """The parameters and their defaults, without annotations, which say the same in other words from version to version."""
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        parameter = parameter.replace(annotation=inspect.Parameter.empty)
        if parameter.default is not inspect.Parameter.empty:
            parameter = parameter.replace(default=default_text(parameter.default))
        parameters.append(parameter)
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def lines_of(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, ModuleType):
        yield f"module {name}"
    elif isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}({bases})" if bases else f"class {name}"
        if "__init__" in vars(value):
            yield f"    __init__{signature_text(value.__init__)}"
        yield from [f"    field {field}" for field in getattr(value, "_fields", ())]
        for member_name, member in sorted(public_members(value).items()):
            kind = "property " if isinstance(member, property) else ""
            yield f"    {kind}{member_name}{'' if kind else signature_text(function_of(member))}"
    elif callable(value):
        yield f"def {name}{signature_text(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def public_text() -> str:
    lines = [f"# The public names of torchgraft. Written by: {COMMAND}", ""]
    for name in sorted(torchgraft.__all__):
        lines += lines_of(f"torchgraft.{name}", getattr(torchgraft, name))
    for name in sorted(torchgraft._MODULES | {"distributed", "passes", "quantize", "schedule", "zoo"}):
        module = importlib.import_module(f"torchgraft.{name}")
        names = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
        names = [key for key in sorted(names) if not isinstance(getattr(module, key), ModuleType)]
        lines += ["", f"module torchgraft.{name}", *[f"    {key}" for key in names if key != "annotations"]]
    return "\n".join(lines) + "\n"


def test_the_list_of_public_names_is_up_to_date() -> None:
    found, expected = public_text(), GOLDEN.read_text(encoding="utf-8")
    difference = "\n".join(
        difflib.unified_diff(expected.splitlines(), found.splitlines(), "golden", "found", lineterm="", n=1)
    )
    assert found == expected, f"the public names have changed; if that is wanted, run: {COMMAND}\n{difference}"


# ---- names ----


@pytest.mark.parametrize("name", torchgraft.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(torchgraft, name) is not None
    assert name in dir(torchgraft)


@pytest.mark.parametrize("name", SURFACE)
def test_the_surface_is_public(name: str) -> None:
    assert name in torchgraft.__all__


@pytest.mark.parametrize(("name", "members"), MEMBERS.items())
def test_members_that_users_of_torch_fx_know(name: str, members: str) -> None:
    cls = getattr(torchgraft, name)
    annotated = {key for base in cls.__mro__ for key in getattr(base, "__annotations__", {})}
    assert [member for member in members.split() if not hasattr(cls, member) and member not in annotated] == []


@pytest.mark.parametrize(
    "name", ["Graph", "Node", "GraphModule", "Tracer", "Proxy", "Interpreter", "Transformer", "CodeGen"]
)
def test_nothing_of_a_class_of_torch_fx_is_missing(name: str) -> None:
    import torch.fx

    theirs, ours = getattr(torch.fx, name), getattr(torchgraft, name)
    missing = {member for member in dir(theirs) if not member.startswith("_") and not hasattr(ours, member)}
    assert missing <= ABSENT.get(name, set())


@pytest.mark.parametrize("name", sorted(torchgraft._MODULES))
def test_every_module_path_resolves(name: str) -> None:
    module = importlib.import_module(f"torchgraft.{name}")
    assert getattr(torchgraft, name) is module
    assert module.__doc__


def test_tab_completion_shows_public_names_only() -> None:
    assert dir(torchgraft) == sorted(torchgraft.__all__)
    assert {"zoo", "passes", "capture", "report"} <= set(dir(torchgraft))
    assert [name for name in dir(torchgraft) if name.startswith("_") and name != "__version__"] == []
    assert dir(torchgraft.passes) == torchgraft.passes.__all__


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'torchgraft' has no attribute 'symbolic_trac'"):
        torchgraft.symbolic_trac


# ---- documentation ----


def documented() -> Iterator[tuple[str, Any]]:
    for name in torchgraft.__all__:
        value = getattr(torchgraft, name)
        if isinstance(value, type) or inspect.isfunction(value):
            yield name, value
        if isinstance(value, type):
            for member_name, member in public_members(value).items():
                function = function_of(member)
                # A method made by a table of operators, or taken from a base, is documented there.
                if inspect.isfunction(function) and function.__name__ == member_name:
                    yield f"{name}.{member_name}", function


@pytest.mark.parametrize(("name", "value"), [pytest.param(*item, id=item[0]) for item in documented()])
def test_every_public_class_and_function_is_documented(name: str, value: Any) -> None:
    assert inspect.getdoc(value), f"torchgraft.{name} has no docstring"


def test_importing_torchgraft_does_not_import_torch() -> None:
    environment = {**os.environ, "PYTHONPATH": str(GOLDEN.parents[2] / "src")}
    text = "import sys, torchgraft; torchgraft.__version__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", text], check=True, env=environment)


def test_comparing_programs_does_not_import_the_compiler_of_torch() -> None:
    """Only the kernels of quantized programs need it, and it takes longer than all the rest."""
    environment = {**os.environ, "PYTHONPATH": str(GOLDEN.parents[2] / "src")}
    text = "import sys, torchgraft.quantize, torchgraft.recording.doctor; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", text], check=True, env=environment)


# ---- torchgraft.traceback ----


def test_records_of_where_a_node_came_from() -> None:
    import torch.fx
    from torch.fx import traceback as theirs

    from torchgraft import traceback as ours

    texts = []
    for fx, library in ((torch.fx, theirs), (torchgraft, ours)):
        graph = fx.Graph()
        x = graph.placeholder("x")
        y = graph.call_function(torch.relu, (x,))
        y.meta["from_node"] = [library.NodeSource(x, "first", library.NodeSourceAction.CREATE)]
        actions = [library.NodeSourceAction.CREATE, library.NodeSourceAction.REPLACE]
        source = library.NodeSource(y, "second", actions)
        assert source == library.NodeSource(y, "second", actions) != library.NodeSource(x)
        assert len({source, library.NodeSource(y, "second", actions)}) == 1
        assert library.get_graph_provenance_json(graph) == {"relu": [y.meta["from_node"][0].to_dict()]}
        assert library.NodeSource(None).to_dict()["graph_id"] == -1
        texts.append((str(source) + str(source.to_dict())).replace(str(id(graph)), "graph"))
    assert texts[0].split("<built-in")[0] == texts[1].split("<built-in")[0]


def test_metadata_has_no_surroundings_unless_they_are_kept() -> None:
    from torchgraft import traceback

    assert "test_metadata_has_no_surroundings" in traceback.format_stack()[-1]
    assert not traceback.has_preserved_node_meta()
    assert traceback.get_current_meta() == {}
    with traceback.annotate({"stage": 1}):
        program = torchgraft.symbolic_trace(lambda x: x + 1)
    assert all("custom" not in node.meta for node in program.graph.nodes)


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(public_text(), encoding="utf-8")
