"""torch.fx's experimental.rewriter: `AST_Rewriter` writes a function anew without `assert` and annotated assignments.
`RewritingTracer` needs no such copy of a model: assertions are found while it traces (`capturing/tracer_base.py`).
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from types import FunctionType
from typing import Any

import torch

from torchgraft.capturing.symbolic.tracer import Tracer
from torchgraft.capturing.tracer_base import assert_traced
from torchgraft.errors import TraceError
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of

__all__ = ["AST_Rewriter", "RewritingTracer"]


class RewritingTracer(Tracer):
    """Records `assert` statements as calls of `torch._assert`, with their text where it is a plain one."""

    trace_asserts = True

    def trace(self, root: Any, concrete_args: Any = None) -> Graph:
        """The graph of `root`, assertions included."""
        graph = super().trace(root, concrete_args)
        for node in graph.find_nodes(op="call_function", target=assert_traced):
            node.target, node.args = torch._assert, (node.args[0], _message(node))
            node._rename("_assert")
        return graph


def _message(node: Node) -> str:
    source = source_of(node)
    try:
        [statement] = ast.parse(source.text.strip() if source is not None else "").body
    except (SyntaxError, ValueError):
        return ""
    message = statement.msg if isinstance(statement, ast.Assert) else None
    return message.value if isinstance(message, ast.Constant) and isinstance(message.value, str) else ""


class AST_Rewriter(ast.NodeTransformer):  # noqa: N801 (torch.fx's name)
    """Writes functions anew so that they can be traced; methods `visit_…` of a subclass change more of them.

    >>> import torch, torchgraft
    >>> def function(x):
    ...     assert x.sum() > 0, "positive"
    ...     return x
    >>> [node.name for node in torchgraft.symbolic_trace(AST_Rewriter().rewrite(function)).graph.nodes]
    ['x', 'sum_1', 'gt', '_assert', 'output']
    """

    def rewrite(self, fn: FunctionType) -> FunctionType:
        """The function that the changed source defines, with the globals, closure and defaults of the old one."""
        method = inspect.unwrap(fn)
        function: Any = getattr(method, "__func__", method)
        try:
            source = textwrap.dedent(inspect.getsource(function))
            tree = ast.parse(source)
        except (OSError, TypeError, SyntaxError) as error:
            raise TraceError(
                f"cannot rewrite {function.__qualname__}: its source cannot be read\n  define it in a file, with def"
            ) from error
        definition = next((item for item in tree.body if isinstance(item, ast.FunctionDef)), None)
        if definition is None:
            raise TraceError(f"cannot rewrite {function.__qualname__}: it is no def\n  define it with def")
        definition.decorator_list = []
        code = _code_of(ast.fix_missing_locations(self.visit(tree)), function)
        result = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        result.__kwdefaults__ = function.__kwdefaults__
        result.__annotations__ = dict(function.__annotations__)
        bound: Any = result if function is method else result.__get__(method.__self__)
        return bound

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """`assert test, message` becomes `torch._assert(test, message)`."""
        check = ast.Attribute(value=ast.Name(id="torch", ctx=ast.Load()), attr="_assert", ctx=ast.Load())
        call = ast.Call(func=check, args=[node.test, node.msg or ast.Constant("")], keywords=[])
        return ast.copy_location(ast.Expr(call), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """`y: kind = value` becomes `y = annotate(value, kind)`."""
        if node.value is None:
            return node
        call = ast.Call(func=ast.Name(id="annotate", ctx=ast.Load()), args=[node.value, node.annotation], keywords=[])
        return ast.copy_location(ast.Assign(targets=[node.target], value=call), node)


def _code_of(tree: ast.Module, function: Any) -> Any:
    """The code that the tree defines; what the old function closes over is closed over again, in the same order."""
    names = function.__code__.co_freevars
    text = ast.unparse(tree)
    if names:
        inner = textwrap.indent(text, "    ")
        text = f"def _outer():\n    {' = '.join(names)} = None\n{inner}\n    return {function.__name__}\n"
    file = f"<{function.__qualname__}, rewritten>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # Only the code is taken; defaults and annotations are those of the old function, and need not be evaluated.
    pending = [compile(text, file, "exec", dont_inherit=True)]
    while pending:
        for item in pending.pop().co_consts:
            if inspect.iscode(item):
                if item.co_name == function.__name__ and item.co_freevars == names:
                    return item
                pending.append(item)
    raise TraceError(
        f"cannot rewrite {function.__qualname__}: what it closes over has changed\n  keep the names that it uses"
    )
