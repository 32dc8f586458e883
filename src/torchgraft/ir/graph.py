"""A program: an ordered list of nodes, where new ones go, and the edits that concern more than one node.
What happens to a program afterwards lives elsewhere: checks in `verify.py`, copies in `copying.py`, text in `printing.py`,
Python code in `codegen/`, dead code in `passes/`; the methods here that torch.fx users expect are thin calls into those rooms.

The rules kept here:
3. Every walk is deterministic.
4. Iterating while editing is defined: a node inserted after the current one is seen, one inserted before it is not, an
   erased one is skipped.
6. Editing a graph marks its module stale; the next call regenerates.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import GraphError, TargetError
from torchgraft.ir.arguments import EMPTY_DICT
from torchgraft.ir.names import Namespace, wish_of
from torchgraft.ir.node import OPCODES, Argument, Node, Target, map_arg

if TYPE_CHECKING:
    from torchgraft.codegen.source import CodeGen, PythonCode

# Room between the order labels of neighbours, so that most insertions need no renumbering.
_ORDER_GAP = 1 << 16

_MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "no default"})()


# What a module has for its graph, and not for its nodes.
_ABOUT_THE_GRAPH = frozenset({"_graph", "_edit_hooks", "_deepcopy_hooks"})


class EditHooks:
    """Functions told about edits of a graph; a GraphModule owns them and hands them to the graph it runs."""

    __slots__ = ("create", "erase", "replace")

    def __init__(self) -> None:
        self.create: list[Callable[[Node], Any]] = []
        self.erase: list[Callable[[Node], Any]] = []
        self.replace: list[Callable[..., Any]] = []


class SharedHooks:
    """The hooks of all the modules that run one graph."""

    __slots__ = ("_graph",)

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def _of_all(self, kind: str) -> list[Callable[..., Any]]:
        owners: list[Any] = [reference() for reference in self._graph._owners]
        return [hook for owner in owners if hasattr(owner, "_edit_hooks") for hook in getattr(owner._edit_hooks, kind)]

    create = property(lambda self: self._of_all("create"))
    erase = property(lambda self: self._of_all("erase"))
    replace = property(lambda self: self._of_all("replace"))


class NodeList:
    """The nodes of a graph in order; may be walked while the graph is edited."""

    __slots__ = ("_backward", "_graph")

    def __init__(self, graph: Graph, backward: bool = False) -> None:
        self._graph = graph
        self._backward = backward

    def __len__(self) -> int:
        return self._graph._length

    def __iter__(self) -> Iterator[Node]:
        root = self._graph._root
        if self._backward:
            node = root._prev
            while node is not root:
                if not node._erased:
                    yield node
                node = node._prev
        else:
            node = root._next
            while node is not root:
                if not node._erased:
                    yield node
                node = node._next

    def __reversed__(self) -> Iterator[Node]:
        return iter(NodeList(self._graph, not self._backward))

    def __repr__(self) -> str:
        return repr(list(self))


class InsertPoint:
    """Where new nodes go, set at once and put back at the end of a `with` block."""

    __slots__ = ("_graph", "_previous")

    def __init__(self, graph: Graph, anchor: Node, after: bool) -> None:
        self._graph = graph
        self._previous = graph._anchor, graph._after
        graph._anchor, graph._after = anchor, after

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._graph._anchor, self._graph._after = self._previous


def _refuse_target(op: str, target: Any) -> None:
    if op not in OPCODES:
        raise GraphError(f"cannot create a node with opcode {op!r}: use one of {', '.join(OPCODES)}")
    wanted = "a Callable" if op == "call_function" else "a str"
    raise TargetError(
        f"cannot create a {op} node: its target {target!r} has type {torch.typename(target)} but {wanted} is expected"
    )


class Graph:
    """A program as a list of nodes.

    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> y = graph.call_function(torch.relu, (x,))
    >>> print(graph.output(y), [node.op for node in graph.nodes])
    output ['placeholder', 'call_function', 'output']
    """

    def __init__(
        self,
        owning_module: torch.nn.Module | None = None,
        tracer_cls: type | None = None,
        tracer_extras: dict[str, Any] | None = None,
    ) -> None:
        root = Node(self, "", "root", "")
        root._prev = root._next = root
        self._root = root
        self._length = 0
        self._anchor = root
        self._after = False
        self._graph_namespace = Namespace()
        self._owners: list[weakref.ref[torch.nn.Module]] = []
        # What the last of them has, so that it is still known when only the graph is left.
        self._contents: dict[str, Any] | torch.nn.Module | None = None
        self._hooks: EditHooks | SharedHooks | None = None
        self._tracer_cls = tracer_cls
        self._tracer_extras = tracer_extras
        self._code_generator: CodeGen | None = None
        # Values met while capturing that are no attribute of the model (a tensor from a closure); `get_attr` reaches them
        # by these names once a GraphModule is made of the graph.
        self._constants: dict[str, Any] = {}
        # What an edit has taken out of the program's result; see `passes/remove_dead_code.py`.
        self._former_results: dict[Node, None] = {}
        # True while some owner holds code generated from exactly this state.
        self._fresh = False
        # True while two neighbours may carry the same order label.
        self._order_is_stale = False
        if owning_module is not None:
            self._add_owner(owning_module)

    # ---- owners and staleness ----

    @property
    def owning_module(self) -> Any:
        """The one module that runs this graph, or None where there is none or more than one. When it is gone, a plain module with
        all that it had."""
        owners = [owner for reference in self._owners if (owner := reference()) is not None]
        if owners or self._contents is None:
            return owners[0] if len(owners) == 1 else None
        if isinstance(self._contents, dict):
            module = torch.nn.Module()
            vars(module).update(self._contents)
            self._contents = module
        return self._contents

    @owning_module.setter
    def owning_module(self, module: torch.nn.Module | None) -> None:
        self._owners, self._contents = [], None
        if module is not None:
            self._add_owner(module)

    def _add_owner(self, module: torch.nn.Module) -> None:
        if not any(reference() is module for reference in self._owners):
            self._owners.append(weakref.ref(module))
        self._contents = {name: value for name, value in vars(module).items() if name not in _ABOUT_THE_GRAPH}

    def _remove_owner(self, module: torch.nn.Module) -> None:
        self._owners = [reference for reference in self._owners if reference() not in (module, None)]
        self._hooks = SharedHooks(self) if self._owners else None

    def _invalidate(self) -> None:
        self._fresh = False
        for reference in self._owners:
            owner = reference()
            if owner is not None:
                owner._graph_changed()  # type: ignore[operator]

    def _notify_replace(self, old: Node, new: Any, user: Node) -> None:
        if self._hooks is not None and self._hooks.replace:
            for hook in self._hooks.replace:
                hook(old=old, new=getattr(new, "name", new), user=user)

    # ---- walking ----

    @property
    def nodes(self) -> NodeList:
        """Every node, in order."""
        return NodeList(self)

    def output_node(self) -> Node:
        """The `output` node, which is the last one in a well-formed graph."""
        for node in reversed(self.nodes):
            if node._op == "output":
                return node
        raise GraphError("this graph has no output node; make one with graph.output(...)")

    def find_nodes(self, *, op: str, target: Target | None = None, sort: bool = True) -> list[Node]:
        """Every node with this opcode and, for calls, this target; always in program order."""
        if op == "call_function" and target is None:
            raise GraphError("find_nodes(op='call_function') needs a target: say which function")
        if target is None:
            return [node for node in self.nodes if node._op == op]
        return [node for node in self.nodes if node._op == op and node._target == target]

    # ---- making nodes ----

    def create_node(
        self,
        op: str,
        target: Target,
        args: tuple[Argument, ...] | None = None,
        kwargs: Mapping[str, Argument] | None = None,
        name: str | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Make a node at the insertion point; `name` is a wish, made unique if it is taken."""
        if type(target) is str if op == "call_function" else op not in OPCODES or not isinstance(target, str):
            _refuse_target(op, target)
        if args is None:
            args = ()
        elif not isinstance(args, tuple):
            raise GraphError(f"cannot create a {op} node: args must be a tuple, not {type(args).__name__}; make it one")
        if kwargs is None:
            kwargs = EMPTY_DICT
        elif not isinstance(kwargs, dict):
            raise GraphError(
                f"cannot create a {op} node: kwargs must be a dict, not {type(kwargs).__name__}; make it one"
            )
        return self._make_node(op, target, args, kwargs, name or wish_of(target), type_expr)

    def _make_node(
        self,
        op: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        wish: str,
        type_expr: Any,
    ) -> Node:
        """`create_node` for callers whose arguments are known to be right."""
        node = Node(self, self._graph_namespace.create_name(wish), op, target, args, kwargs, type_expr)
        if self._fresh:
            self._invalidate()
        anchor = self._anchor
        if anchor is self._root and not self._after:
            previous = anchor._prev  # appending, which is what tracing does all the time
            node._prev = previous
            node._next = anchor
            previous._next = anchor._prev = node
            node._order = previous._order + _ORDER_GAP
            self._length += 1
        else:
            # An anchor erased inside its own `with` block leaves a gap; new nodes go there.
            while anchor._erased:
                anchor = anchor._prev if self._after else anchor._next
            self._link(node, anchor._next if self._after else anchor)
        if self._hooks is not None:
            for hook in self._hooks.create:
                hook(node)
        return node

    def placeholder(self, name: str, type_expr: Any = None, default_value: Any = _MISSING) -> Node:
        """An input. `name` may start with `*` or `**`."""
        args = () if default_value is _MISSING else (default_value,)
        return self.create_node("placeholder", name, args, type_expr=type_expr)

    def get_attr(self, qualified_name: str, type_expr: Any = None) -> Node:
        """Fetch an attribute of the owning module, which must be there if the graph has an owner."""
        owner = self.owning_module
        if owner is not None:
            self._warn_unless_present(owner, "get_attr", qualified_name)
        return self.create_node("get_attr", qualified_name, type_expr=type_expr)

    def call_module(
        self,
        module_name: str,
        args: tuple[Argument, ...] | None = None,
        kwargs: Mapping[str, Argument] | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Call a submodule of the owning module."""
        owner = self.owning_module
        if owner is not None:
            self._warn_unless_present(owner, "call_module", module_name)
        return self.create_node("call_module", module_name, args, kwargs, type_expr=type_expr)

    def call_method(
        self,
        method_name: str,
        args: tuple[Argument, ...] | None = None,
        kwargs: Mapping[str, Argument] | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Call a method of `args[0]`."""
        return self.create_node("call_method", method_name, args, kwargs, type_expr=type_expr)

    def call_function(
        self,
        the_function: Callable[..., Any],
        args: tuple[Argument, ...] | None = None,
        kwargs: Mapping[str, Argument] | None = None,
        type_expr: Any = None,
        name: str | None = None,
    ) -> Node:
        """Call a function."""
        if not callable(the_function):
            raise GraphError(
                f"cannot call {the_function!r}: call_function needs a function; a method name goes to call_method"
            )
        return self.create_node("call_function", the_function, args, kwargs, name, type_expr)

    def output(self, result: Argument, type_expr: Any = None) -> Node:
        """Return `result`, a tree of nodes and constants."""
        return self.create_node("output", "output", (result,), type_expr=type_expr)

    def node_copy(self, node: Node, arg_transform: Callable[[Node], Argument] = lambda node: node) -> Node:
        """Copy a node, usually of another graph, into this one; `arg_transform` gives the nodes its arguments become here."""
        result = self.create_node(
            node._op,
            node._target,
            map_arg(node._args, arg_transform),
            map_arg(node._kwargs, arg_transform) if node._kwargs else EMPTY_DICT,
            node._name,
            node._type,
        )
        result._origin = node._origin
        result._meta = None if node._meta is None else dict(node._meta)
        return result

    def graph_copy(self, g: Graph, val_map: dict[Node, Node], return_output_node: bool = False) -> Any:
        """Copy every node of `g` into this graph and return what its output refers to here (None without an output).

        Nodes in `val_map` are taken as given; the copies made are added to it.
        """
        for node in g.nodes:
            if node in val_map:
                continue
            if node._op == "output":
                result = map_arg(node._args[0], lambda source: val_map[source])
                return (result, node) if return_output_node else result
            val_map[node] = self.node_copy(node, lambda source: val_map[source])
        return None

    # ---- order ----

    def inserting_before(self, n: Node | None = None) -> InsertPoint:
        """Make new nodes just before `n` (without `n`: at the beginning) until the `with` block ends."""
        if n is None:
            return InsertPoint(self, self._root, True)
        self._check_anchor(n, "before")
        return InsertPoint(self, n, False)

    def inserting_after(self, n: Node | None = None) -> InsertPoint:
        """Make new nodes just after `n` (without `n`: at the end) until the `with` block ends."""
        if n is None:
            return InsertPoint(self, self._root, False)
        self._check_anchor(n, "after")
        return InsertPoint(self, n, True)

    def _check_anchor(self, node: Node, place: str) -> None:
        if node.graph is not self:
            raise GraphError(f"Node to insert {place} is not in graph.\n  '{node._name}' belongs to another one")
        if node._erased:
            self._refuse_anchor(node)

    def _refuse_anchor(self, node: Node) -> None:
        raise GraphError(
            f"cannot insert at node '{node._name}': it was erased; choose a live node as the insertion point"
        )

    def _link(self, node: Node, following: Node) -> None:
        previous = following._prev
        node._prev = previous
        node._next = following
        previous._next = node
        following._prev = node
        self._length += 1
        if following is self._root:
            node._order = previous._order + _ORDER_GAP
        else:
            node._order = (previous._order + following._order) >> 1
            if node._order == previous._order:
                self._order_is_stale = True

    def _renumber(self) -> None:
        """Give every node a fresh order label; done when somebody compares nodes after many insertions at one place."""
        self._order_is_stale = False
        order = 0
        for node in self.nodes:
            order += _ORDER_GAP
            node._order = order

    def _move(self, node: Node, following: Node) -> None:
        if node.graph is not self:
            raise GraphError(
                f"cannot move node '{node._name}' here: it belongs to another graph; use graph.node_copy()"
            )
        node._changing()
        if following._erased:
            self._refuse_anchor(following)
        if node is following:
            return
        node._prev._next, node._next._prev = node._next, node._prev
        self._length -= 1
        self._link(node, following)

    def erase_node(self, to_erase: Node) -> None:
        """Remove a node that nothing uses any more; a guard that checks it counts as a use."""
        if to_erase.graph is not self:
            raise GraphError(
                f"Attempting to remove {to_erase._name} from wrong graph!\n  erase it with its own: node.graph.erase_node(node)"
            )
        if to_erase._erased:
            warnings.warn(f"erase_node({to_erase._name}) on an already erased node", stacklevel=2)
            return
        to_erase._changing()
        if to_erase._users:
            names = ", ".join(f"'{user._name}'" for user in to_erase._users)
            remedy = "give them another input first, for example with node.replace_all_uses_with()"
            if all(user._is_guard() for user in to_erase._users):
                remedy = "erase these guards first if the program may do without them"
            raise GraphError(
                f"Tried to erase Node {to_erase._name} but it still had {len(to_erase._users)} users in the graph: {names}; "
                f"{remedy}"
            )
        if self._hooks is not None:
            for hook in self._hooks.erase:
                hook(to_erase)
        if to_erase._op == "output":
            self._former_results.update(dict.fromkeys(to_erase._inputs))
        for source in to_erase._inputs:
            source._users.pop(to_erase, None)
        to_erase._inputs = ()
        # The dead node keeps its links, so that a walk standing on it finds the way on.
        to_erase._prev._next, to_erase._next._prev = to_erase._next, to_erase._prev
        to_erase._erased = True
        self._length -= 1

    # ---- names ----

    def _target_to_str(self, target: Any) -> str:
        return wish_of(target)

    def _warn_unless_present(self, owner: torch.nn.Module, op: str, path: str) -> None:
        from torchgraft.ir.verify import find_attribute

        problem = find_attribute(owner, path)[1]
        if problem is not None:
            warnings.warn(
                f"made a {op} node for '{path}', which has no underlying reference in the owning GraphModule: {problem}; "
                "add it, for example with add_submodule(), before the program runs",
                stacklevel=3,
            )

    # ---- rooms next door ----

    @property
    def _codegen(self) -> CodeGen:
        if self._code_generator is None:
            from torchgraft.codegen.source import CodeGen

            self._code_generator = CodeGen()
        return self._code_generator

    @_codegen.setter
    def _codegen(self, codegen: CodeGen) -> None:
        self._code_generator = codegen
        if self._fresh:
            self._invalidate()

    def set_codegen(self, codegen: CodeGen) -> None:
        """Use another code generator for this graph."""
        self._codegen = codegen

    def on_generate_code(self, make_transformer: Callable[[Any], Callable[[list[str]], list[str]]]) -> Any:
        """Register a function over the lines of generated code; see `torchgraft.codegen.source.BodyTransformer`."""
        from torchgraft.codegen.source import install_body_transformer

        return install_body_transformer(self, make_transformer)

    def process_inputs(self, *args: Any) -> Any:
        """Turn the arguments of a call into the values of the placeholders."""
        return self._codegen.process_inputs(*args)

    def process_outputs(self, out: Any) -> Any:
        """Turn the value of the output node into what a call returns."""
        return self._codegen.process_outputs(out)

    def python_code(
        self,
        root_module: str,
        *,
        verbose: bool = False,
        include_stride: bool = False,
        include_device: bool = False,
        colored: bool = False,
        expanded_def: bool = False,
        record_func: bool = False,
        additional_meta: Sequence[str] | None = None,
    ) -> PythonCode:
        """Generate Python source. `verbose` adds shapes at line ends (with `include_stride`, `include_device`, `colored`) and the
        user's source lines above, with what `node.meta` has under the names in `additional_meta`; `expanded_def` gives each
        parameter a line.
        """
        options = {"verbose": verbose, "include_stride": include_stride, "include_device": include_device}
        options |= {"colored": colored, "expanded_def": expanded_def, "record_func": record_func}
        return self._codegen.generate(self, root_module, **options, additional_meta=additional_meta)

    def lint(self) -> None:
        """Raise GraphError with a list of everything that is not well formed."""
        from torchgraft.ir.verify import lint

        lint(self)

    def eliminate_dead_code(self, is_impure_node: Callable[[Node], bool] | None = None) -> bool:
        """Erase what is neither used nor has an effect, and what only led to a result that an edit took away; say whether
        anything was erased.
        """
        from torchgraft.passes.remove_dead_code import eliminate_dead_code

        return eliminate_dead_code(self, is_impure_node)

    def print_tabular(self, source: bool = False) -> None:
        """Print the nodes as a table; with `source`, also the user's line that each was made from."""
        from torchgraft.ir.printing import tabular_text

        print(tabular_text(self, source))  # noqa: T201 (printing is what the method is asked for)

    def __str__(self) -> str:
        from torchgraft.ir.printing import graph_text

        return graph_text(self)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Graph:
        from torchgraft.ir.copying import copy_graph

        return copy_graph(self, memo if memo is not None else {})

    def __getstate__(self) -> dict[str, Any]:
        from torchgraft.ir.copying import graph_state

        return graph_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        from torchgraft.ir.copying import restore_graph

        restore_graph(self, state)
