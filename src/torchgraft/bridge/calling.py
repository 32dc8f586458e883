"""How a program is called, in both languages: code generators, trees of arguments, and functions over generated lines.
The documented hooks of a user's own code generator are carried over; one that replaces the whole generator is refused.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx
from torch.fx import graph as fx_graph

from torchgraft.codegen.source import CodeGen, PyTreeCodeGen
from torchgraft.errors import BridgeError
from torchgraft.ir.graph import Graph
from torchgraft.ir.pytree import children_of, tree_flatten_spec

_COUNTER = re.compile(r"# COUNTER: (\d+)\s*")


class CallTreeCodeGen(PyTreeCodeGen):
    """A call as torch.fx and torch.export describe it: positional and keyword arguments apart, or `self` among the leaves.

    >>> from torch.utils import _pytree as pytree
    >>> spec = pytree.tree_structure(((1, 2), {"scale": 3}))
    >>> print(CallTreeCodeGen(["x", "y", "scale"], spec).gen_fn_def(["x", "y", "scale"], ""))
    def forward(self, x, y, scale):
        x, y, scale, = fx_pytree.tree_flatten_spec([(x, y,), {'scale': scale}], self._in_spec)
    """

    # What takes the arguments apart in generated code.
    _flatten = "fx_pytree.tree_flatten_spec"

    @property
    def _takes_self(self) -> bool:
        return bool(self.parameters) and self.parameters[0] == "self"

    @property
    def _keywords(self) -> list[str] | None:
        return keyword_names(self.in_spec)

    def process_inputs(self, *args: Any) -> Any:
        """The leaves of the arguments; keyword arguments follow the positional ones in the order of the signature."""
        keywords = self._keywords
        if keywords is not None:
            count = len(args) - len(keywords)
            return tree_flatten_spec([args[:count], dict(zip(keywords, args[count:], strict=True))], self.in_spec)
        if self._takes_self:
            leaves = tree_flatten_spec([None, *args], self.in_spec)
            return leaves[1:]
        return super().process_inputs(*args)

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str) -> str:
        """The user's own parameters, then one line that takes them apart."""
        leaves = [text.split("=")[0].split(":")[0].strip().lstrip("*") for text in free_vars]
        head = self._heading(maybe_return_annotation)
        if not leaves:
            return head
        if self._takes_self:
            leaves.insert(0, "self")
        return f"{head}\n    {', '.join(leaves)}, = {self._flatten}({self._values()}, self._in_spec)"

    def _heading(self, annotation: str) -> str:
        return CodeGen.gen_fn_def(self, list(self.parameters), annotation)

    def _values(self) -> str:
        names = [name.lstrip("*") for name in self.parameters]
        keywords = self._keywords
        if keywords is None:
            return f"[{', '.join(names)}]"
        count = len(names) - len(keywords)
        positional = "".join([f"{name}, " for name in names[:count]]).rstrip(" ")
        named = [f"{key!r}: {name}" for key, name in zip(keywords, names[count:], strict=True)]
        return f"[({positional}), {{{', '.join(named)}}}]"


def keyword_names(spec: Any) -> list[str] | None:
    """The keywords of a tree that is (positional arguments, keyword arguments); None for a tree of another form."""
    children = children_of(spec)
    if spec.type is tuple and len(children) == 2 and children[0].type is tuple and children[1].type is dict:
        return list(children[1].context)
    return None


# ---- functions over the lines of generated code ----


class TransformerFromTorchFx:
    """torch.fx hands its body transformers fragments with counters between them; ours get whole lines."""

    def __init__(self, original: Callable[[list[str]], list[str]]) -> None:
        self.original = original

    def __call__(self, lines: list[str]) -> list[str]:
        fragments = []
        for number, line in enumerate(lines):
            statement, separator, freed = line.rstrip("\n").rpartition(";  ")
            is_free = separator and freed.endswith(" = None")
            fragments.append(f"# COUNTER: {number}\n")
            fragments += [statement, f"{separator}{freed}\n"] if is_free else [line.rstrip("\n"), "\n"]
        text = "".join(self.original(fragments))
        return [line for line in text.splitlines(keepends=True) if not _COUNTER.fullmatch(line)]


class TransformerFromTorchgraft:
    """The other way; lines that come back unchanged get their counters back, which torch.fx's error messages use."""

    def __init__(self, original: Callable[[list[str]], list[str]]) -> None:
        self.original = original

    def __call__(self, fragments: list[str]) -> list[str]:
        counters: dict[str, str] = {}
        counter, lines = "", []
        for line in "".join(fragments).splitlines(keepends=True):
            if _COUNTER.fullmatch(line):
                counter = line
            elif line.strip():
                counters.setdefault(line, counter)
                lines.append(line)
        result = []
        for line in self.original(lines):
            text = line if line.endswith("\n") else f"{line}\n"
            result.append(counters.get(text, "") + text)
        return result


# ---- code generators that a user wrote ----


class CodeGenFromTorchFx(CodeGen):
    """Answers our code generator's questions by asking one written for torch.fx."""

    def __init__(self, original: fx_graph.CodeGen) -> None:
        super().__init__()
        self.original = original

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str) -> str:
        return self.original.gen_fn_def(free_vars, maybe_return_annotation)

    def generate_output(self, output_args: Any, *, repr_fn: Callable[[Any], str] = repr) -> str:
        return _call_with(self.original.generate_output, output_args, repr_fn=repr_fn)

    def process_inputs(self, *args: Any) -> Any:
        return self.original.process_inputs(*args)

    def process_outputs(self, outputs: Any) -> Any:
        return self.original.process_outputs(outputs)

    def additional_globals(self) -> list[tuple[str, Any]]:
        # The text it writes was meant for torch.fx's own function of this name.
        return [("fx_pytree", torch.fx._pytree), *self.original.additional_globals()]


class CodeGenFromTorchgraft(fx_graph.CodeGen):
    """Answers torch.fx's questions by asking a code generator written for torchgraft."""

    def __init__(self, original: CodeGen) -> None:
        super().__init__()
        self.original = original

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        return self.original.gen_fn_def(free_vars, maybe_return_annotation)

    def generate_output(self, output_args: Any, *, descs: Any = None, repr_fn: Any = None) -> str:
        return _call_with(self.original.generate_output, output_args, repr_fn=repr_fn or repr)

    def process_inputs(self, *args: Any) -> Any:
        return self.original.process_inputs(*args)

    def process_outputs(self, outputs: Any) -> Any:
        return self.original.process_outputs(outputs)

    def additional_globals(self) -> list[tuple[str, Any]]:
        return self.original.additional_globals()


def _call_with(function: Callable[..., str], value: Any, **options: Any) -> str:
    """Overrides written before an option existed do not take it."""
    known = inspect.signature(function).parameters
    return function(value, **{key: option for key, option in options.items() if key in known})


# ---- from one to the other ----


def our_codegen(theirs: fx_graph.CodeGen) -> CodeGen | None:
    """Our code generator for the same call; None for the default."""
    transformer, name = theirs._body_transformer, theirs._func_name
    result: CodeGen
    if isinstance(theirs, CodeGenFromTorchgraft):
        result = copy.copy(theirs.original)
    elif type(theirs) is fx_graph._PyTreeCodeGen and theirs.pytree_info is not None:
        result = _our_tree_codegen(theirs.pytree_info)
    elif type(theirs) in (fx_graph.CodeGen, fx_graph._PyTreeCodeGen):
        if transformer is None and name == "forward":
            return None
        result = CodeGen()
    else:
        _require_hooks_only(type(theirs), fx_graph.CodeGen, "_gen_python_code", "from_fx")
        result = CodeGenFromTorchFx(copy.copy(theirs))
    result._func_name = name
    result._body_transformer = _translated(transformer, TransformerFromTorchgraft, TransformerFromTorchFx)
    return result


def _our_tree_codegen(info: Any) -> PyTreeCodeGen:
    parameters: Sequence[str] = info.orig_args
    plain = (not parameters or parameters[0] != "self") and keyword_names(info.in_spec) is None
    kind = PyTreeCodeGen if plain else CallTreeCodeGen
    return kind(list(parameters), info.in_spec, info.out_spec)


def their_codegen(graph: Graph) -> fx_graph.CodeGen:
    """torch.fx's code generator for the call of one of our graphs."""
    ours = graph._codegen
    result: fx_graph.CodeGen
    if isinstance(ours, CodeGenFromTorchFx):
        result = copy.copy(ours.original)
    elif type(ours) in (PyTreeCodeGen, CallTreeCodeGen):
        assert isinstance(ours, PyTreeCodeGen)
        result = fx_graph._PyTreeCodeGen(fx_graph._PyTreeInfo(list(ours.parameters), ours.in_spec, ours.out_spec))
    elif type(ours) is CodeGen:
        result = fx_graph.CodeGen()
    else:
        _require_hooks_only(type(ours), CodeGen, "generate", "to_fx")
        result = CodeGenFromTorchgraft(copy.copy(ours))
    result._func_name = ours._func_name
    result._body_transformer = _translated(ours._body_transformer, TransformerFromTorchFx, TransformerFromTorchgraft)
    return result


def _translated(transformer: Any, back: Any, forth: Any) -> Any:
    if transformer is None:
        return None
    return transformer.original if isinstance(transformer, back) else forth(transformer)


def _require_hooks_only(cls: type, base: type, generator: str, direction: str) -> None:
    if getattr(cls, generator, None) is not getattr(base, generator, None):
        raise BridgeError(
            f"{direction} cannot carry over the code generator {cls.__name__}: it overrides {generator}, which writes the "
            "whole function and differs between the two libraries; override gen_fn_def, generate_output, process_inputs, "
            "process_outputs or additional_globals instead, or call graph.set_codegen() with the default before converting"
        )
