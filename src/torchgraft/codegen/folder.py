"""A program as a Python package: `module.py` with its code, and files with its modules, tensors and other values.
What the code says is decided in `source.py`; a package is read by Python's own import, and needs torchgraft only if the
program calls something of it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.util
import os
import re
import secrets
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.codegen.graph_module import _OWN_NAMES, GraphModule
from torchgraft.codegen.source import PyTreeCodeGen
from torchgraft.errors import GraphError, one_line
from torchgraft.ir.arguments import map_aggregate
from torchgraft.ir.graph import Graph
from torchgraft.ir.names import STANDARD_GLOBALS
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.ir.printing import qualified_name

# Names that module.py uses for itself.
_RESERVED = frozenset({"_load", "os"})

_TEXT = '''\
"""The program {name}, written by torchgraft: {name}() builds it from the files beside this one."""

{imports}

__all__ = ["{name}"]


def _load(name, map_location=None):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    return torch.load(path, map_location=map_location, weights_only=False)

{prelude}
{function}


class {name}(torch.nn.Module):
{modules}
    def __init__(self, map_location=None):
        super().__init__()
        vars(self).update(_load("modules.pt", map_location))
{specs}
    forward = {function_name}
'''


def write_folder(module: GraphModule, folder: str | os.PathLike[str], module_name: str = "FxModule") -> None:
    """Write `module` so that `from <folder> import <module_name>` and `<module_name>()` give it back, values included.

    Everything is written to a place of its own first and then moved, so that a failure leaves nothing half-written. Files of
    an earlier package are replaced; what else is in the folder stays. Plain attributes that the program does not use, and
    metadata of nodes, are not part of the package.
    """
    if not module_name.isidentifier() or iskeyword(module_name) or module_name in _RESERVED | STANDARD_GLOBALS.keys():
        raise GraphError(f"cannot write a class called {module_name!r}: choose a module_name that Python code can use")
    place = Path(os.path.abspath(folder))
    if place.exists() and not place.is_dir():
        raise FileExistsError(f"cannot write a package to {place}: it is a file; choose another folder")
    # Inside the folder if there is one: only there is it sure that files can be moved without being copied.
    staging = place / ".writing" if place.exists() else place.with_name(f".{place.name}.writing")
    staging = staging.with_name(f"{staging.name}.{secrets.token_hex(4)}")
    staging.mkdir(parents=True)
    try:
        _write(module, module_name, staging)
        _move_into_place(staging, place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    importlib.invalidate_caches()


def _move_into_place(staging: Path, place: Path) -> None:
    if not place.exists():
        staging.rename(place)
        return
    for source in sorted(staging.iterdir()):
        target = place / source.name
        source.replace(target)
        if target.suffix == ".py":
            with contextlib.suppress(NotImplementedError):
                # Python trusts bytecode by time and size of the source; two programs written within a second can agree.
                Path(importlib.util.cache_from_source(target)).unlink(missing_ok=True)


def _write(module: GraphModule, name: str, folder: Path) -> None:
    """Write every file."""
    graph = module.graph
    code = graph.python_code(root_module="self")
    function_name = graph._codegen._func_name
    tree = ast.parse(code.src)
    function = next(item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name == function_name)
    first = min([function.lineno, *[decorator.lineno for decorator in function.decorator_list]]) - 1
    lines = code.src.splitlines()
    imports, saved = _globals(module, name, code.globals, tree)
    prelude = [f"{key} = _saved[{key!r}]" for key in saved]
    if saved:
        _save(saved, folder / "globals.pt", "the values that its code uses")
        prelude.insert(0, '_saved = _load("globals.pt")')
    contents, specs = _contents(module)
    _save(contents, folder / "modules.pt", "its modules and tensors")
    if specs:
        imports.append("from torch.utils import _pytree as pytree")
    text = _TEXT.format(
        name=name,
        imports="\n".join(dict.fromkeys(imports)),
        prelude="\n".join([*prelude, *[line for line in lines[:first] if line.strip()], ""]),
        function="\n".join(lines[first : function.end_lineno]),
        function_name=function_name,
        modules="".join([f"    # {line.strip()}\n" for line in torch.nn.Module.__repr__(module).splitlines()[1:-1]]),
        specs="".join([f"        self.{key} = pytree.tree_structure(self.{key})\n" for key in specs]),
    )
    compile(text, "module.py", "exec")
    (folder / "module.py").write_text(text, encoding="utf-8")
    (folder / "__init__.py").write_text("from .module import *\n", encoding="utf-8")


def _globals(
    module: GraphModule, name: str, known: dict[str, Any], tree: ast.Module
) -> tuple[list[str], dict[str, Any]]:
    """The imports that give the code its globals, and the globals that have to be saved."""
    used = {item.id for item in ast.walk(tree) if isinstance(item, ast.Name)}
    needed = {key: value for key, value in known.items() if key in used and value is not vars(builtins).get(key)}
    if any(key in needed for key in (name, "_saved", *_RESERVED)):
        raise GraphError(
            f"cannot write class '{name}': the code needs this name, or one of {sorted(_RESERVED)}, for something else\n"
            "choose another module_name, or rename the global"
        )
    imports, saved = ["import os", "import torch"], {}
    for key, value in needed.items():
        lines = import_lines(key, value)
        if lines is None and is_code(value):
            user = next((node for node in module.graph.nodes if _mentions(node, value)), None)
            where = (
                "" if user is None else f"\n  node '{user.name}' needs it, at {source_of(user) or 'an unknown line'}"
            )
            raise GraphError(
                f"cannot write the program as a package: other programs cannot import '{value.__module__}.{value.__qualname__}'"
                f"{where}\ndefine it at the top level of an importable module, or replace the node"
            )
        if lines is None:
            saved[key] = value
        imports += lines or []
    return imports + [line for line in map(registration_import, operators_of(module.graph)) if line], saved


def _mentions(node: Node, value: Any) -> bool:
    found = [node.target is value, node.type is value]
    map_aggregate((node.args, dict(node.kwargs)), lambda leaf: found.append(leaf is value or type(leaf) is value))
    return any(found)


def _contents(module: GraphModule) -> tuple[dict[str, Any], list[str]]:
    """What the module holds: its tables and the attributes that the program uses; and which of these are structures of
    arguments. Those are saved as a value that has the structure, which is tied to no version of torch."""
    fetched = {node.target.partition(".")[0] for node in module.graph.nodes if node.op == "get_attr"}
    standard = vars(torch.nn.Module()).keys()
    contents = {
        key: value
        for key, value in vars(module).items()
        if key in standard or (key in fetched and key not in _OWN_NAMES)
    }
    codegen, specs = module.graph._codegen, []
    if isinstance(codegen, PyTreeCodeGen):
        for key, spec in (("_in_spec", codegen.in_spec), ("_out_spec", codegen.out_spec)):
            if spec is not None:
                contents[key] = pytree.tree_unflatten([0] * spec.num_leaves, spec)
                specs.append(key)
    return contents, specs


def _save(value: Any, path: Path, what: str) -> None:
    try:
        torch.save(value, path)
    except Exception as error:  # pickling runs code of the user's classes, which may raise anything
        raise GraphError(
            f"cannot write the program as a package: {what} cannot be pickled\n  {one_line(error)}\n"
            "define the class at the top level of an importable module, or trace through the module that has it"
        ) from error


# ---- imports ----


_STANDARD_IMPORTS = {
    "inf": "from math import inf",
    "nan": "from math import nan",
    "NoneType": "from types import NoneType",
    "torch": "import torch",
    "device": "from torch import device",
    "fx_pytree": "from torchgraft.ir import pytree as fx_pytree",
    "pytree": "from torch.utils import _pytree as pytree",
}
_DEFINITIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def import_lines(name: str, value: Any) -> list[str] | None:
    """Lines after which `name` is `value` in any process, or None if it cannot be imported.

    >>> import math
    >>> import_lines("math_sqrt", math.sqrt), import_lines("square", lambda x: x * x)
    (['from math import sqrt as math_sqrt'], None)
    """
    if name in _STANDARD_IMPORTS and STANDARD_GLOBALS[name] is value:
        return [_STANDARD_IMPORTS[name]]
    for path in _dotted_names(value):
        found = _locate(path, value)
        if found is None:
            continue
        module, attributes = found
        if not attributes:
            return [f"import {module} as {name}"]
        first, *rest = attributes
        lines = [f"from {module} import {first}" if first == name else f"from {module} import {first} as {name}"]
        return lines + [f"{name} = {'.'.join([name, *rest])}"] * bool(rest)
    return None


def is_code(value: Any) -> bool:
    """Whether a global is a function, class or module: pickling a copy of it is no substitute for importing it."""
    return isinstance(value, _DEFINITIONS)


def registration_import(operator: Any) -> str | None:
    """The line that registers an operator of another library with torch, as far as torch knows where it came from."""
    namespace = str(operator).partition(".")[0]
    name = "::".join(str(operator).split(".")[:2])
    try:
        from torch._library.custom_ops import OPDEFS

        home = OPDEFS[name]._init_fn.__module__
    except (ImportError, KeyError, AttributeError):
        home = namespace
    if home == "__main__" or home.partition(".")[0] == "torch" or home not in sys.modules:
        return None
    return f"import {home}"


def operators_of(graph: Graph) -> list[Any]:
    """Every operator that a graph calls or passes on."""
    found: dict[Any, None] = {}
    for node in graph.nodes:
        map_aggregate(
            (node.target, node.args, dict(node.kwargs)),
            lambda leaf: found.setdefault(leaf) if isinstance(leaf, _OPERATORS) else None,
        )
    return list(found)


def _dotted_names(value: Any) -> Iterator[str]:
    """Where a value says it can be found, the most public name first."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    home = getattr(value, "__module__", None)
    owner = getattr(value, "__self__", None)
    if isinstance(value, types.ModuleType):
        yield value.__name__
    if isinstance(owner, type):
        yield f"{owner.__module__}.{owner.__qualname__}.{value.__name__}"
    if isinstance(home, str) and isinstance(name, str):
        if home.startswith("torchgraft."):
            yield f"torchgraft.{name}"
        yield f"{home}.{name}"
    if callable(value):
        yield from _attempt(qualified_name, value)
    yield from _attempt(repr, value)  # types of typing


def _attempt(describe: Callable[[Any], str], value: Any) -> Iterator[str]:
    try:
        text = describe(value)
    except Exception:  # a user's __repr__ may raise anything
        return
    if re.fullmatch(r"\w+(\.\w+)+", text):
        yield text


def _locate(path: str, value: Any) -> tuple[str, list[str]] | None:
    """The module and the attributes that lead to `value`, or None if the path leads elsewhere."""
    parts = path.split(".")
    if parts[0] == "__main__" or "<locals>" in parts:
        return None
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        found: Any = _imported(module)
        if found is None:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        is_method = isinstance(value, types.MethodType | types.BuiltinMethodType)  # made anew each time it is looked up
        return (module, parts[length:]) if found is value or (is_method and found == value) else None
    return None


def _imported(module: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
