"""A program as a Python package: `module.py` with its code and the building of its modules, and files with its values.
What the code says is decided in `source.py`, what it imports in `imports.py`; a package is read by Python's own import, and
needs torchgraft only if the program calls something of it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.util
import itertools
import os
import pickle
import re
import shutil
import textwrap
import warnings
from collections.abc import Iterator
from keyword import iskeyword
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchgraft.codegen.constructors import (
    assignment,
    constructor_text,
    empty_tensor,
    expression,
    is_bare,
    is_container,
)
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.codegen.imports import import_lines, must_be_imported, operators_of, registration_import, unavailable
from torchgraft.codegen.source import PyTreeCodeGen
from torchgraft.errors import GraphError
from torchgraft.ir.graph import Graph
from torchgraft.ir.names import STANDARD_GLOBALS

_LITERALS = (bool, int, float, str, type(None), torch.dtype)
# Names that module.py uses for itself.
_RESERVED = frozenset({"_file", "_saved", "os"})

_numbers = itertools.count()


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
    staging = staging.with_name(f"{staging.name}.{os.getpid()}.{next(_numbers)}")
    staging.mkdir(parents=True)
    try:
        package = _Package(module, module_name, staging)
        package.write()
        _move_into_place(staging, place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    importlib.invalidate_caches()
    for text in package.warnings:
        warnings.warn(text, stacklevel=3)


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


class _Function(NamedTuple):
    """The generated function of one program."""

    name: str
    text: str


class _Package:
    """What is to be written, collected on a walk over a module.

    `module.py` builds everything on the meta device, so that nothing is initialised for nothing; then come the values.
    """

    def __init__(self, module: GraphModule, class_name: str, folder: Path) -> None:
        self.root = module
        self.class_name = class_name
        self.folder = folder
        self.imports: dict[str, None] = {"import os": None, "import torch": None}
        self.globals: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}
        self.preludes: dict[str, None] = {}
        self.classes: list[str] = []
        self.structure: list[str] = []
        self.whole: dict[str, str] = {}  # from paths of modules to the expressions that read them
        self.values: list[str] = []
        self.constants: dict[str, Any] = {}
        self.warnings: list[str] = []
        self._paths: dict[int, str] = {}
        self._closed: set[int] = set()
        self._files = {"state_dict", "constants", "globals"}

    def write(self) -> None:
        """Write every file."""
        if not is_bare(self.root):
            raise GraphError(
                f"cannot write {type(self.root).__name__} as a package: hooks are registered on it, which code cannot say; "
                "remove them first, or make what they do part of the program"
            )
        forward = self._function(self.root)
        self._contents(self.root, "")
        if forward is None or self.class_name in self.globals:
            raise GraphError(
                f"cannot write class '{self.class_name}': the code needs this name, or one of {sorted(_RESERVED)}, for "
                "something else; choose another module_name, or rename the global"
            )
        self._program_values(self.root, "")
        self._tie()
        state = self.root.state_dict()
        torch.save(state, self.folder / "state_dict.pt")
        tensors_only = all(type(value) in (torch.Tensor, torch.nn.Parameter) for value in state.values())
        self.classes.append(_class(self.class_name, self._constructor(tensors_only), forward))
        for name, values in (("constants", self.constants), ("globals", self.saved)):
            if values:
                torch.save(values, self.folder / f"{name}.pt")
        text = self._text()
        compile(text, "module.py", "exec")
        (self.folder / "module.py").write_text(text, encoding="utf-8")
        (self.folder / "__init__.py").write_text("from .module import *\n", encoding="utf-8")

    # ---- modules and their tensors ----

    def _contents(self, module: torch.nn.Module, path: str) -> None:
        """Statements that make what an empty `module` at `path` contains."""
        self._paths[id(module)] = path
        holder = expression(path)
        for name, parameter in module._parameters.items():
            value = "None"
            if parameter is not None:
                empty = empty_tensor(parameter, _join(path, name))
                value = f"torch.nn.Parameter({empty}, requires_grad={parameter.requires_grad})"
                if type(parameter) is not torch.nn.Parameter:
                    self._constant(_join(path, name), parameter)
            self.structure.append(f"{holder}.register_parameter({name!r}, {value})")
        for name, buffer in module._buffers.items():
            value = "None" if buffer is None else empty_tensor(buffer, _join(path, name))
            volatile = name in module._non_persistent_buffers_set
            self.structure.append(f"{holder}.register_buffer({name!r}, {value}{', persistent=False' * volatile})")
            if volatile and buffer is not None:
                self._constant(_join(path, name), buffer)
        for name, child in module._modules.items():
            self._child(child, path, name)

    def _child(self, child: torch.nn.Module | None, holder: str, name: str) -> None:
        path = _join(holder, name)
        if child is None or id(child) in self._paths:
            self._place_later(holder, name, None if child is None else expression(self._paths[id(child)]))
            return
        self._paths[id(child)] = path
        if self._nested_program(child, path):
            self._contents(child, path)
            self._program_values(child, path)  # type: ignore[arg-type]
        elif is_container(child):
            self.structure.append(assignment(path, f"torch.nn.{type(child).__name__}()"))
            self._contents(child, path)
        else:
            self._closed.add(id(child))
            text = constructor_text(child)
            if text is None:
                self._place_later(holder, name, self._pickle(child, path))
                self._share(child, path)
            else:
                self._construct(child, path, text)

    def _place_later(self, holder: str, name: str, source: str | None) -> None:
        """Keep the place of a module among its siblings, which decides about the order of parameters."""
        self.structure.append(f"{expression(holder)}._modules[{name!r}] = None")
        if source is not None:
            self.whole[_join(holder, name)] = source

    def _share(self, whole: torch.nn.Module, path: str) -> None:
        """Let what stands both inside and outside of a pickled module be one module again."""
        for name, part in _ordinary_modules(whole):
            full = _join(path, name) if name else path
            original = self._paths.setdefault(id(part), full)
            if original != full:
                self.whole[full] = expression(original)

    def _construct(self, child: torch.nn.Module, path: str, text: str) -> None:
        self.structure.append(assignment(path, text))
        for name, parameter in child._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                self.structure.append(f"{expression(_join(path, name))}.requires_grad_(False)")
        for name, buffer in child._buffers.items():
            if buffer is not None and name in child._non_persistent_buffers_set:
                self._constant(_join(path, name), buffer)

    def _pickle(self, child: torch.nn.Module, path: str) -> str:
        """Write a module whole, and return the expression that reads it."""
        file = self._new_file(path)
        if isinstance(child, torch.jit.ScriptModule):
            torch.jit.save(child, str(self.folder / file))
            return f"torch.jit.load(_file({file!r}), map_location=map_location)"
        try:
            torch.save(child, self.folder / file)
        except Exception as error:  # pickling runs code of the user's classes, which may raise anything
            raise GraphError(
                f"cannot write module '{path}'{self._user_of(path)}: a {type(child).__name__} cannot be pickled ({error}); "
                "define its class at the top level of an importable module, or trace through it instead of keeping it a leaf"
            ) from error
        here = sorted({type(part).__qualname__ for part in child.modules() if type(part).__module__ == "__main__"})
        if here:
            self.warnings.append(
                f"module '{path}' is pickled and needs {', '.join(here)} of the program that is running now (__main__); "
                "move the class to a module of its own, so that other programs can load the package"
            )
        return f"torch.load(_file({file!r}), map_location=map_location, weights_only=False)"

    def _new_file(self, path: str) -> str:
        stem = re.sub(r"\W", "_", path)
        while stem.lower() in self._files:
            stem += "_"
        self._files.add(stem.lower())
        return f"{stem}.pt"

    def _user_of(self, path: str) -> str:
        users = [node.name for node in self.root.graph.nodes if f"{node.target}.".startswith(f"{path}.")]
        return f", which node '{users[0]}' uses" if users else ""

    # ---- values that are neither parameters nor in the state_dict ----

    def _constant(self, path: str, value: Any) -> None:
        self.values.append(assignment(path, self._stored(path, value)))

    def _stored(self, path: str, value: Any) -> str:
        """The expression for a value that no table of a module holds: a literal, or an entry of constants.pt."""
        if type(value) in _LITERALS:
            return repr(value)
        if not isinstance(value, torch.Tensor):
            try:
                pickle.dumps(value)
            except Exception as error:  # pickling runs code of the user's classes, which may raise anything
                raise GraphError(
                    f"cannot write attribute '{path}'{self._user_of(path)}: a {type(value).__name__} cannot be pickled "
                    f"({error}); make it an input of the program, or define its class at the top level of a module"
                ) from error
        self.constants[path] = value
        return f"constants[{path!r}]"

    def _program_values(self, module: GraphModule, prefix: str) -> None:
        """The attributes of no module's tables that a program fetches, and the structure of its arguments."""
        for path in dict.fromkeys([node.target for node in module.graph.nodes if node.op == "get_attr"]):
            found = self._plain_attribute(module, path)
            if found is not None and _join(prefix, found[0]) not in self.constants:
                self._constant(_join(prefix, found[0]), found[1])
        codegen = module.graph._codegen
        if isinstance(codegen, PyTreeCodeGen):
            for name, spec in (("_in_spec", codegen.in_spec), ("_out_spec", codegen.out_spec)):
                if spec is not None:
                    self._argument_structure(_join(prefix, name), spec)

    def _plain_attribute(self, module: torch.nn.Module, path: str) -> tuple[str, Any] | None:
        """The first thing on the way along `path` that is no module, unless it comes with its module."""
        holder = module
        names = path.split(".")
        for count, name in enumerate(names, 1):
            if id(holder) in self._closed or name in {*holder._parameters, *holder._buffers, "training"}:
                return None
            if name not in holder._modules:
                return ".".join(names[:count]), getattr(holder, name)
            holder = getattr(holder, name)
        return None

    def _argument_structure(self, path: str, spec: Any) -> None:
        """A spec is written as a value that has this structure: that is readable, and tied to no version of torch."""
        example = pytree.tree_unflatten([0] * spec.num_leaves, spec)
        text = repr(example)
        try:
            is_literal = pytree.tree_structure(ast.literal_eval(text)) == spec
        except (ValueError, SyntaxError, TypeError):
            is_literal = False
        if not is_literal:
            text = self._stored(path, example)
        self.imports["from torch.utils import _pytree as pytree"] = None
        self.values.append(assignment(path, f"pytree.tree_structure({text})"))

    def _tie(self) -> None:
        """Statements that make one tensor of what is one tensor under several names."""
        first: dict[int, str] = {}
        for path, owner in _ordinary_modules(self.root):
            for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
                full = _join(path, name)
                original = full if tensor is None else first.setdefault(id(tensor), full)
                if original != full and not self._come_together(original, full):
                    self.values.append(assignment(full, expression(original)))
        for path, value in self.constants.items():
            if first.get(id(value), path) != path and isinstance(value, torch.Tensor):
                self.values.append(assignment(path, expression(first[id(value)])))

    def _come_together(self, first: str, second: str) -> bool:
        return any(first.startswith(f"{path}.") and second.startswith(f"{path}.") for path in self.whole)

    # ---- programs ----

    def _nested_program(self, child: torch.nn.Module, path: str) -> bool:
        """Write a class for a program that is called by this one; False for what is no program or has more to it."""
        if not isinstance(child, GraphModule) or type(child).__bases__ != (GraphModule,) or not is_bare(child):
            return False
        function = self._function(child)
        if function is None:
            return False
        name = re.sub(r"\W", "_", f"_{self.class_name}_{path}_{len(self.classes)}")
        self.classes.append(_class(name, "", function))
        self.structure.append(assignment(path, f"{name}()"))
        return True

    def _function(self, module: GraphModule) -> _Function | None:
        """The function of a program; None if it needs a name that is something else in this package."""
        graph = module.graph
        code = graph.python_code(root_module="self")
        name = graph._codegen._func_name
        tree = ast.parse(code.src)
        used = {item.id for item in ast.walk(tree) if isinstance(item, ast.Name)}
        needed = {
            key: value for key, value in code.globals.items() if key in used and value is not vars(builtins).get(key)
        }
        if any(self.globals.get(key, value) is not value or key in _RESERVED for key, value in needed.items()):
            return None
        for key, value in needed.items():
            if key not in self.globals:
                self.globals[key] = value
                self._import(graph, key, value)
        self.imports.update(dict.fromkeys(filter(None, map(registration_import, operators_of(graph)))))
        function = next(item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name == name)
        start = min([function.lineno, *[decorator.lineno for decorator in function.decorator_list]]) - 1
        lines = code.src.splitlines()
        self.preludes.update(dict.fromkeys([line for line in lines[:start] if line.strip()]))
        return _Function(name, "\n".join(lines[start : function.end_lineno]))

    def _import(self, graph: Graph, name: str, value: Any) -> None:
        lines = import_lines(name, value)
        if lines is not None:
            self.imports.update(dict.fromkeys(lines))
        elif isinstance(value, torch.jit.ScriptFunction):
            file = self._new_file(name)
            torch.jit.save(value, str(self.folder / file))
            self.preludes[f"{name} = torch.jit.load(_file({file!r}))"] = None
        elif must_be_imported(value):
            raise unavailable(graph, value, "which other programs cannot import")
        else:
            try:
                pickle.dumps(value)
            except Exception as error:  # pickling runs code of the user's classes, which may raise anything
                raise unavailable(graph, value, f"which cannot be pickled ({error})") from error
            self.saved[name] = value
            self.preludes[f"{name} = _saved[{name!r}]"] = None

    # ---- text ----

    def _constructor(self, tensors_only: bool) -> str:
        root = self.root
        lines = ["super().__init__()"]
        if self.structure:
            lines += ['with torch.device("meta"):  # the values come from the files', *_indented(self.structure)]
        state = f'torch.load(_file("state_dict.pt"), map_location=map_location, weights_only={tensors_only})'
        lines += [f"state = {state}", f"self.load_state_dict(state, strict={not self.whole}, assign=True)"]
        if self.whole:
            # Modules read whole may know their tensors under further names, so these are filled and not replaced.
            lines += [*[assignment(path, text) for path, text in self.whole.items()], "self.load_state_dict(state)"]
        if self.constants:
            lines.append('constants = torch.load(_file("constants.pt"), map_location=map_location, weights_only=False)')
        lines += self.values
        others = [path for path, module in _ordinary_modules(root) if module.training is not root.training]
        if others or self.whole:
            wanted = f"name {'not in' if root.training else 'in'} {others!r}" if others else repr(root.training)
            lines.append("for name, module in self.named_modules():")
            lines.append("    if not isinstance(module, torch.jit.ScriptModule):")
            lines.append(f"        module.training = {wanted}")
        elif not root.training:
            lines.append("self.eval()")
        return "\n".join(["def __init__(self, map_location=None):", *_indented(lines)])

    def _text(self) -> str:
        name = self.class_name
        pieces = [
            f'__all__ = ["{name}"]',
            "def _file(name):\n    return os.path.join(os.path.dirname(os.path.abspath(__file__)), name)",
        ]
        if self.saved:
            pieces.append('_saved = torch.load(_file("globals.pt"), weights_only=False)')
        if self.preludes:
            pieces.append("\n".join(self.preludes))
        pieces += [f"\n{text}" for text in self.classes]
        body = "\n\n".join(pieces)
        used = {item.id for item in ast.walk(ast.parse(body)) if isinstance(item, ast.Name)}
        self.imports.update(dict.fromkeys([f"from math import {word}" for word in ("inf", "nan") if word in used]))
        head = f'"""The program {name}, written by torchgraft: {name}() builds it from the files beside this one."""'
        return "\n\n".join([head, "\n".join(self.imports), body]) + "\n"


def _class(name: str, constructor: str, function: _Function) -> str:
    # Inside a class Python gives names that begin with two underscores another meaning.
    words = re.findall(r"[^\W\d]\w*", function.text)
    mangled = any(word.startswith("__") and not word.endswith("__") for word in words)
    lines = [f"class {name}(torch.nn.Module):"]
    if constructor:
        lines += [textwrap.indent(constructor, "    "), ""]
    if not mangled:
        lines.append(textwrap.indent(function.text, "    "))
    if mangled or function.name != "forward":
        lines.append(f"    forward = {function.name}")
    return "\n".join([function.text, "", "", *lines] if mangled else lines)


def _indented(lines: list[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _ordinary_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module once, without scripted ones: these keep their own flags, and make their tensors anew at each look."""
    return ((path, module) for path, module in root.named_modules() if not isinstance(module, torch.jit.ScriptModule))
