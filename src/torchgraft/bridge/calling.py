"""How a program is called, in both languages: code generators and trees of arguments.
A code generator of the user's own is refused: the code that it writes is for one library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import graph as fx_graph

from torchgraft.codegen.source import CodeGen, PyTreeCodeGen
from torchgraft.errors import BridgeError
from torchgraft.ir.graph import Graph
from torchgraft.ir.pytree import children_of, tree_flatten_spec


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

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        leaves = [text.split("=")[0].split(":")[0].strip().lstrip("*") for text in free_vars]
        head = CodeGen.gen_fn_def(self, list(self.parameters), maybe_return_annotation)
        if not leaves:
            return head
        if self._takes_self:
            leaves.insert(0, "self")
        return f"{head}\n    {', '.join(leaves)}, = {self._flatten}({self._values()}, self._in_spec)"

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


def our_codegen(theirs: fx_graph.CodeGen) -> CodeGen | None:
    """Our code generator for the same call; None for the default."""
    _refuse_own_code("from_fx", theirs, (fx_graph.CodeGen, fx_graph._PyTreeCodeGen))
    info = getattr(theirs, "pytree_info", None)
    if info is None and theirs._func_name == "forward":
        return None
    result = CodeGen() if info is None else _our_tree_codegen(info)
    result._func_name = theirs._func_name
    return result


def _our_tree_codegen(info: Any) -> PyTreeCodeGen:
    parameters: Sequence[str] = info.orig_args
    plain = (not parameters or parameters[0] != "self") and keyword_names(info.in_spec) is None
    kind = PyTreeCodeGen if plain else CallTreeCodeGen
    return kind(list(parameters), info.in_spec, info.out_spec)


def their_codegen(graph: Graph) -> fx_graph.CodeGen:
    """torch.fx's code generator for the call of one of our graphs."""
    ours = graph._codegen
    _refuse_own_code("to_fx", ours, (CodeGen, PyTreeCodeGen, CallTreeCodeGen))
    if isinstance(ours, PyTreeCodeGen):
        info = fx_graph._PyTreeInfo(list(ours.parameters), ours.in_spec, ours.out_spec)
        result: fx_graph.CodeGen = fx_graph._PyTreeCodeGen(info)
    else:
        result = fx_graph.CodeGen()
    result._func_name = ours._func_name
    return result


def _refuse_own_code(direction: str, codegen: Any, known: tuple[type, ...]) -> None:
    """What somebody wrote for the code generator of one library does not fit that of the other."""
    if type(codegen) not in known or codegen._body_transformer is not None:
        what = type(codegen).__name__ if type(codegen) not in known else "function set with on_generate_code()"
        raise BridgeError(
            f"{direction} cannot carry over the {what}, which writes code for one library only\n"
            "call graph.set_codegen() with the default one before converting"
        )
