"""A program as a Python function: signature, one line a node, `with` blocks for regions, and values freed after last use.
How single values are written is in `values.py`; turning the text into a running module is in `graph_module.py`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.codegen.values import SourceGlobals
from torchgraft.errors import GraphError
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.guards import is_guard
from torchgraft.ir.leaf_functions import wrap
from torchgraft.ir.names import Namespace
from torchgraft.ir.node import Node
from torchgraft.ir.origin import user_source_line
from torchgraft.ir.printing import known_value, value_text
from torchgraft.ir.pytree import spec_data, spec_from_data, tree_flatten_spec

if TYPE_CHECKING:
    from torchgraft.ir.graph import Graph, NodeList

BodyTransformer = Callable[[list[str]], list[str]]

# Operators are written the way people write them.
_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**", "matmul": "@",
    "lshift": "<<", "rshift": ">>", "and_": "&", "or_": "|", "xor": "^",
}  # fmt: skip
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">="}
OPERATOR_TEXT = {name: f"{{}} {sign} {{}}" for name, sign in (_SIGNS | _COMPARISONS).items()}
OPERATOR_TEXT |= {"div": "{} / {}", "getitem": "{}[{}]", "pos": "+{}", "neg": "-{}", "invert": "~{}"}
INPLACE_TEXT = {f"i{name.removesuffix('_')}": f"{{}} {sign}= {{}}" for name, sign in _SIGNS.items()}
INPLACE_TEXT["setitem"] = "{}[{}] = {}"


@dataclass
class PythonCode:
    """Generated source, the globals it needs, and which node each of its lines came from."""

    src: str
    globals: dict[str, Any]
    _lineno_map: dict[int, int | None] | None = None
    _prologue_start: int = 0


class CodeGen:
    """Generates the code of a graph. Override `gen_fn_def`, `generate_output`, `process_inputs`, `process_outputs` or
    `additional_globals` to change the calling convention.

    >>> import torchgraft
    >>> class Commented(CodeGen):
    ...     def gen_fn_def(self, *args, **kwargs):
    ...         return super().gen_fn_def(*args, **kwargs) + "  # from Commented"
    >>> program = torchgraft.symbolic_trace(lambda x: x + 1)
    >>> program.graph.set_codegen(Commented())
    >>> program.code.strip().splitlines()[0]
    'def forward(self, x):  # from Commented'
    """

    def __init__(self) -> None:
        self._body_transformer: BodyTransformer | None = None
        self._func_name = "forward"

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        """The `def` line; `free_vars` are the parameters with annotations and defaults, on lines of their own if wanted."""
        if not free_vars or free_vars[0] != "self":
            free_vars.insert(0, "self")
        parameters = "".join([f"\n    {text}," for text in free_vars]) + "\n" if expanded_def else ", ".join(free_vars)
        return f"def {self._func_name}({parameters}){maybe_return_annotation}:"

    def generate_output(
        self, output_args: Any, *, descs: Any = None, repr_fn: Callable[[Any], str] | None = None
    ) -> str:
        """The `return` line; `repr_fn` writes an argument tree as source. Descriptions are torch.fx's, and not written."""
        return f"return {(repr_fn or repr)(output_args)}"

    def process_inputs(self, *args: Any) -> Any:
        """What the placeholders receive when the generated function is called with `args`; for interpreters."""
        return args

    def process_outputs(self, outputs: Any) -> Any:
        """What a call returns when the output node receives `outputs`; for interpreters."""
        return outputs

    def additional_globals(self) -> list[tuple[str, Any]]:
        """Further globals, as (name, value)."""
        return []

    def error_of_call(
        self, error: Exception, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Exception | None:
        """What to raise in the place of an error that calling `module` with these arguments has raised; None for that itself."""
        return None

    def generate(self, graph: Graph, root_module: str = "self", **options: Any) -> PythonCode:
        """Source for `graph`; the options are those of `Graph.python_code`."""
        return self._gen_python_code(graph.nodes, root_module, None, **options)

    def _gen_python_code(
        self,
        nodes: NodeList,
        root_module: str,
        namespace: Namespace | None,
        *,
        verbose: bool = False,
        include_stride: bool = False,
        include_device: bool = False,
        colored: bool = False,
        expanded_def: bool = False,
        record_func: bool = False,
        additional_meta: Sequence[str] | None = None,
    ) -> PythonCode:
        """Source for the nodes of a graph, for generators that override it as a whole; the name space is torch.fx's."""
        if record_func:
            raise GraphError(
                "cannot generate code with record_func: torch.fx's marks for its profiler are not written; run an "
                "Interpreter, or profile the program as it is"
            )
        function = self._function(nodes._graph, root_module)
        function.is_expanded = expanded_def
        if verbose:
            function.comments = _Comments(include_stride, include_device, colored, tuple(additional_meta or ()))
        return function.generate()

    def _function(self, graph: Graph, root_module: str) -> _Function:
        return _Function(graph, root_module, self)


@dataclass
class _Comments:
    """What `print_readable` adds; comments never change what runs."""

    include_stride: bool
    include_device: bool
    colored: bool
    # Further names of metadata to be shown.
    keys: tuple[str, ...] = ()
    _previous: str = field(default="", init=False)

    def paint(self, text: str) -> str:
        return f"\033[2m{text}\033[0m" if self.colored else text

    def above(self, node: Node) -> str | None:
        if node._op in ("placeholder", "output"):
            return None
        texts = [f"# {key}: {node.meta[key]}" for key in self.keys if key in node.meta]
        line = user_source_line(node.stack_trace)
        if line is not None:
            function = f" in {line.function}" if line.function else ""
            texts.append(f"# {line.file}:{line.line}{function}: {line.text}")
        comment = self.paint(" ".join(texts)) if texts else None
        if comment == self._previous:
            return None
        self._previous = comment or self._previous
        return comment

    def behind(self, node: Node) -> str:
        text = value_text(known_value(node), self.include_stride, self.include_device)
        return f"  {self.paint('# ' + text)}" if text else ""

    def input(self, node: Node) -> str | None:
        """A line of its own for an input, which has no statement to stand behind."""
        text = value_text(known_value(node), self.include_stride, self.include_device)
        return self.paint(f"# {node._name}: {text}") if text else None


class _Function:
    """One run of code generation."""

    def __init__(self, graph: Graph, root_module: str, codegen: CodeGen) -> None:
        self.graph = graph
        self.root = root_module
        self.codegen = codegen
        names = Namespace()
        names._used.update(node._name for node in graph.nodes)
        names._used.add(root_module)
        parameters = {str(node._target).lstrip("*") for node in graph.nodes if node._op == "placeholder"}
        self.globals = SourceGlobals(names, parameters)
        names._used |= parameters
        self.parameters: list[str] = []
        self._has_default = False
        self.returned = ""
        self.comments: _Comments | None = None
        self.is_expanded = False
        self.wrapped: dict[str, None] = {}
        self._paths: dict[str, str] = {}
        self._callees: dict[Any, str] = {}

    def generate(self) -> PythonCode:
        body, owners = self._body()
        if not body:
            body, owners = ["pass\n"], [None]
        transformer = self.codegen._body_transformer
        if transformer is not None:
            body, owners = _transformed(transformer, body, owners)
        for name, value in self.codegen.additional_globals():
            self.globals.values[name] = value
        expanded = {"expanded_def": True} if self.is_expanded else {}
        prologue = _call_with_known_options(self.codegen.gen_fn_def, self.parameters, self.returned, **expanded)
        wraps = self._wrap_statements()
        start = wraps.count("\n") + 4
        prologue_lines = prologue.count("\n") + 1
        source = f"\n{wraps}\n\n{prologue}\n    {'    '.join(body)}    "
        line_map: dict[int, int | None] = {}
        line = prologue_lines
        for text, owner in zip(body, owners, strict=True):
            for _ in range(text.count("\n")):
                line_map[line] = owner
                line += 1
        return PythonCode(source, self.globals.values, line_map, start)

    def _wrap_statements(self) -> str:
        if not self.wrapped:
            return ""
        # So that a leaf function stays one when this code is traced again.
        name = self.globals.add("wrap", wrap)
        return "\n".join([f'{name}("{function}")' for function in self.wrapped])

    def _body(self) -> tuple[list[str], list[int | None]]:
        """The lines of the function, and for each the index of its node."""
        frees = self._frees()
        body: list[str] = []
        owners: list[int | None] = []
        indent = ""
        open_regions: list[tuple[Node, int]] = []
        comments = self.comments
        for index, node in enumerate(self.graph.nodes):
            if node._target is exit_context and node._op == "call_function":
                opened = self._close_region(node, open_regions)
                indent = "    " * len(open_regions)
                if len(body) == opened + 1:
                    body.append(f"{indent}    pass\n")
                    owners.append(index)
                continue
            if comments is not None and (comment := comments.above(node)):
                body.append(f"\n    {indent}{comment}\n" if body else f"{indent}{comment}\n")
                owners.append(index)
            text = self._statement(node)
            if text is None and comments is not None:
                text = comments.input(node)
                if text is not None:
                    body.append(f"{text}\n")
                    owners.append(index)
                    continue
            if text is None:
                continue
            if node._target is enter_context and node._op == "call_function":
                body.append(f"{indent}{text}\n")
                open_regions.append((node, len(body) - 1))
                indent = "    " * len(open_regions)
            else:
                freed = frees.get(node)
                if not node._users and node._op not in ("placeholder", "output") and not _is_bare(node):
                    freed = [*freed, node] if freed else [node]
                if freed and node._op not in ("placeholder", "output"):
                    text = f"{text};  {' = '.join([item._name for item in freed])} = None"
                if comments is not None:
                    text += comments.behind(node)
                body.append(f"{indent}{text}\n")
            owners.append(index)
        if open_regions:
            self._refuse_region(open_regions[-1][0], "it is never closed")
        return body, owners

    def _frees(self) -> dict[Node, list[Node]]:
        return last_uses(self.graph)

    def _close_region(self, node: Node, open_regions: list[tuple[Node, int]]) -> int:
        if not open_regions or node._args[0] is not open_regions[-1][0]:
            self._refuse_region(node, "it does not close the innermost open context")
        return open_regions.pop()[1]

    def _refuse_region(self, node: Node, reason: str) -> None:
        raise GraphError(
            f"cannot generate code around node '{node._name}': {reason}; contexts must nest, so keep enter_context and "
            "exit_context in pairs"
        )

    # ---- statements ----

    def _statement(self, node: Node) -> str | None:
        op = node._op
        if op == "call_function":
            return self._call_function(node)
        if op == "placeholder":
            return self._placeholder(node)
        if op == "output":
            if node._type is not None:
                self.returned = f" -> {self.globals.annotation(node._type)}"
            return _call_with_known_options(self.codegen.generate_output, node._args[0], repr_fn=self.globals.text)
        head = f"{node._name} = " if node._type is None else f"{node._name} : {self.globals.annotation(node._type)} = "
        if op == "call_module":
            return f"{head}{self._path(node._target)}({self._arguments(node._args, node._kwargs)})"
        if op == "get_attr":
            return f"{head}{self._path(node._target)}"
        receiver = _attribute(self._receiver(node._args[0]), node._target)
        return f"{head}{receiver}({self._arguments(node._args[1:], node._kwargs)})"

    def _receiver(self, value: Any) -> str:
        text = self.globals.text(value)
        return f"({text})" if type(value) in (int, float, complex) else text

    def _placeholder(self, node: Node) -> str | None:
        text = node._target
        if node._type is not None:
            text += f" : {self.globals.annotation(node._type)}"
        if node._args:
            text += f" = {self.globals.default(node._args[0])}"
            self._has_default = True
        elif self._has_default and text[0] != "*" and not any(item[0] == "*" for item in self.parameters):
            self.parameters.append("*")  # after one with a default it can only be given by name
        self.parameters.append(text)
        plain = node._target.lstrip("*")
        return None if plain == node._name else f"{node._name} = {plain}"

    def _call_function(self, node: Node) -> str:
        target = node._target
        callee = self._callees.get(target)
        if callee is None:
            callee = self._callees[target] = self._callee(target)
        args = node._args
        name = node._name
        head = f"{name} = " if node._type is None else f"{name} : {self.globals.annotation(node._type)} = "
        if callee[-1] == "(":
            if _is_bare(node):
                head = ""
            if node._meta is not None and node._meta.get("is_wrapped"):
                self.wrapped[callee[:-1]] = None
            return f"{head}{callee}{self._arguments(args, node._kwargs)})"
        if target is enter_context:
            return f"with {self._context(args[0])}({self._arguments(args[1:], node._kwargs)}):"
        if target is getattr:
            if len(args) == 2 and isinstance(args[1], str) and args[1].isidentifier() and not node._kwargs:
                return head + _attribute(self._receiver(args[0]), args[1])
            return f"{head}{self.globals.function(getattr)}({self._arguments(args, node._kwargs)})"
        if callee.count("{}") != len(args) or node._kwargs:
            return f"{head}{self.globals.function(target)}({self._arguments(args, node._kwargs)})"
        if target is not operator.setitem and target.__name__ in INPLACE_TEXT:
            # The first argument gets a second name, and the operator works on that: a tensor changes under both names,
            # a number (which cannot change) only under the new one. That is what the operator function does, too.
            expression = callee.format(name, *[self._operand(item, callee) for item in args[1:]])
            return f"{head}{self.globals.text(args[0])};  {expression}"
        expression = callee.format(*[self._operand(item, callee) for item in args])
        if target is operator.setitem:
            return f"{expression};  {head}{self.globals.text(args[0])}"
        return head + expression

    def _context(self, factory: Any) -> str:
        short = f"torch.{factory.__name__}"  # torch.no_grad reads better than the module that defines it
        return short if getattr(torch, factory.__name__, None) is factory else self.globals.function(factory)

    def _operand(self, value: Any, template: str) -> str:
        text = self.globals.text(value)
        # -2 ** x and 3.attr would be read in another way than they were meant.
        return f"({text})" if text[0] == "-" and "**" in template else text

    def _callee(self, target: Any) -> str:
        """`torch.relu(` for a plain call, a template for operators, and the word for the two special forms."""
        if target is getattr or target is enter_context:
            return "special"
        if getattr(target, "__module__", None) == "_operator":
            text = OPERATOR_TEXT.get(target.__name__) or INPLACE_TEXT.get(target.__name__)
            if text is not None:
                return text
        return self.globals.function(target) + "("

    def _path(self, path: str) -> str:
        text = self._paths.get(path)
        if text is None:
            text = self._paths[path] = _attribute(self.root, path)
        return text

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        text = self.globals.text
        parts = [item._name if type(item) is Node else text(item) for item in args]
        if kwargs:
            parts += [
                f"{key} = {text(value)}" if not iskeyword(key) else f"**{{{key!r}: {text(value)}}}"
                for key, value in kwargs.items()
            ]
        return ", ".join(parts)


def _is_bare(node: Node) -> bool:
    """Whether a node is written without its name: a guard, which has no result."""
    return is_guard(node._target) and node._op == "call_function" and not node._users


def _attribute(base: str, path: str) -> str:
    for part in path.split("."):
        base = f"{base}.{part}" if part.isidentifier() and not iskeyword(part) else f'getattr({base}, "{part}")'
    return base


def last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For each node the values nobody needs after it."""
    seen: set[Node] = set()
    frees: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        for source in node._inputs:
            if source not in seen:
                seen.add(source)
                if node in frees:
                    frees[node].append(source)
                else:
                    frees[node] = [source]
    return frees


def _transformed(
    transformer: BodyTransformer, body: list[str], owners: list[int | None]
) -> tuple[list[str], list[int | None]]:
    """Run a user's body transformer; lines it left alone keep their node."""
    by_text: dict[str, int | None] = {}
    for text, owner in zip(body, owners, strict=True):
        by_text.setdefault(text, owner)
    lines = [line if line.endswith("\n") else f"{line}\n" for line in transformer(list(body))]
    result = [line for text in lines for line in text.splitlines(keepends=True)] or ["pass\n"]
    return result, [by_text.get(line) for line in result]


def _call_with_known_options(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call an overridable method with the options that its signature takes; older overrides take fewer."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(*args, **options)
    return function(*args, **{key: value for key, value in options.items() if key in parameters})


class _TransformerInstallation:
    """Puts the previous body transformer back at the end of a `with` block; without one it stays."""

    def __init__(self, graph: Graph, previous: BodyTransformer | None) -> None:
        self._graph = graph
        self._previous = previous

    def __enter__(self) -> None:
        return None

    def __exit__(self, *details: object) -> None:
        self._graph._codegen._body_transformer = self._previous
        self._graph._invalidate()


def install_body_transformer(
    graph: Graph, make_transformer: Callable[[BodyTransformer | None], BodyTransformer]
) -> _TransformerInstallation:
    """Let `make_transformer(current)` see to the lines of every code generated from now on."""
    codegen = graph._codegen
    previous = codegen._body_transformer
    codegen._body_transformer = make_transformer(previous)
    graph._invalidate()
    return _TransformerInstallation(graph, previous)


class PyTreeCodeGen(CodeGen):
    """For programs whose inputs are containers: the call takes them as the user passes them, the program gets the leaves."""

    def __init__(self, parameters: Sequence[str], in_spec: Any, out_spec: Any = None) -> None:
        super().__init__()
        self.parameters = list(parameters)
        self.in_spec = in_spec
        self.out_spec = out_spec

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "in_spec": spec_data(self.in_spec), "out_spec": spec_data(self.out_spec)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.in_spec, self.out_spec = spec_from_data(self.in_spec), spec_from_data(self.out_spec)

    def process_inputs(self, *inputs: Any) -> Any:
        """The leaves of the arguments."""
        return tree_flatten_spec(list(inputs), self.in_spec)

    def process_outputs(self, out: Any) -> Any:
        """The output leaves put back into the structure the user's function returned."""
        from torch.utils import _pytree as pytree

        if self.out_spec is None:
            return out
        return pytree.tree_unflatten(out if isinstance(out, (list, tuple)) else [out], self.out_spec)

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        """The user's own parameters, then one line that takes them apart."""
        leaves = [text.split("=")[0].split(":")[0].strip() for text in free_vars]
        parameters = [name for name in self.parameters if name != "self"]
        head = super().gen_fn_def(list(parameters), maybe_return_annotation, expanded_def=expanded_def)
        if not leaves:
            return head
        values = ", ".join([name.lstrip("*") for name in parameters])
        return f"{head}\n    {', '.join(leaves)}, = fx_pytree.tree_flatten_spec([{values}], self._in_spec)"

    def generate_output(
        self, output_args: Any, *, descs: Any = None, repr_fn: Callable[[Any], str] | None = None
    ) -> str:
        """Return the leaves in the structure the user's function returned."""
        if self.out_spec is None:
            return super().generate_output(output_args, repr_fn=repr_fn)
        return f"return pytree.tree_unflatten({(repr_fn or repr)(output_args)}, self._out_spec)"
