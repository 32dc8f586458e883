"""One operation of a program: its opcode, target, arguments, users and metadata, and the edits of a single node.
The order of nodes and the making of new ones belong to `graph.py`; how a node prints belongs to `printing.py`.

The rules kept here:
1. A node is made by its graph, belongs to it for life, and is dead after `erase_node`; using a dead node raises (erasing it
   again warns).
2. `args` and `kwargs` are immutable; assigning them is the one way to edit, and keeps `users` right on both sides.
3. `users` is ordered, so every walk is deterministic.
6. Every edit marks the graph changed, and with it the module that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import GraphError, UnknownArgumentError
from torchgraft.ir.arguments import EMPTY_DICT, immutable_dict, immutable_list, map_aggregate, rebuild_tuple
from torchgraft.ir.guards import is_guard
from torchgraft.ir.origin import Origin, metadata

if TYPE_CHECKING:
    from torchgraft.ir.graph import Graph

Target = Callable[..., Any] | str
Argument = Any

OPCODES = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")

# Values that can never hold a node: the walk over arguments stops at them after one look-up.
_LEAVES = frozenset(
    {int, float, bool, str, complex, bytes, type(None), type(Ellipsis), range}
    | {torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Tensor, torch.nn.Parameter}
)

# Functions that `has_side_effect` was called on; analysis/effects reads it.
_side_effectful_functions: set[Callable[..., Any]] = set()


def has_side_effect(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Declare that calls of `fn` must never be removed as dead code; usable as a decorator.

    >>> import torchgraft
    >>> @has_side_effect
    ... def log(x): ...  # writes to a file
    >>> graph = torchgraft.Graph()
    >>> node = graph.call_function(log, (graph.placeholder("x"),))
    >>> _ = graph.output(None), graph.eliminate_dead_code()
    >>> [node.name for node in graph.nodes]
    ['x', 'log', 'output']
    """
    _side_effectful_functions.add(fn)
    return fn


class Node:
    """One operation of a `Graph`. Make nodes with the graph's methods, never directly.

    `op` is one of six: `placeholder` (an input; `args[0]` is its default), `get_attr` (a parameter or other attribute of the
    module), `call_function`, `call_method` (on `args[0]`), `call_module`, and `output` (`args[0]` is what is returned).

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.relu(x) * 2)
    >>> [relu] = program.graph.find_nodes(op="call_function", target=torch.relu)
    >>> relu.op, relu.args, list(relu.users)
    ('call_function', (x,), [mul])
    >>> relu.target = torch.neg
    >>> program(torch.ones(2))
    tensor([-2., -2.])
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_args",
        "_erased",
        "_guarded",
        "_inputs",
        "_kwargs",
        "_meta",
        "_name",
        "_next",
        "_op",
        "_order",
        "_origin",
        "_prev",
        "_target",
        "_type",
        "_users",
        "graph",
    )

    graph: Graph
    _users: dict[Node, None]  # everything that reads the node, guards too: what the library itself goes by
    _args: tuple[Argument, ...]
    _kwargs: dict[str, Argument]
    _inputs: tuple[Node, ...]
    _target: Any
    _prev: Node
    _next: Node
    _meta: dict[str, Any] | None
    _origin: Origin | None

    def __init__(
        self,
        graph: Graph,
        name: str,
        op: str,
        target: Target,
        args: tuple[Argument, ...] = (),
        kwargs: Mapping[str, Argument] | None = None,
        return_type: Any = None,
    ) -> None:
        self.graph = graph
        self._name = name
        self._op = op
        self._target = target
        self._type = return_type
        self._users = {}
        self._order = 0
        self._erased = self._guarded = False
        self._meta = self._origin = None
        if not kwargs and len(args) == 1 and type(args[0]) is Node:
            # The commonest case by far; one tuple serves for both. A guard has more arguments than one.
            source = args[0]
            if source.graph is not graph or source._erased:
                _refuse_input(self, source)
            source._users[self] = None
            self._args = self._inputs = args
            self._kwargs = EMPTY_DICT
            return
        inputs: dict[Node, None] = {}
        self._args = freeze_arguments(args, inputs) if args else ()
        self._kwargs = freeze_named(kwargs, inputs) if kwargs else EMPTY_DICT
        for source in inputs:
            if source.graph is not graph or source._erased:
                _refuse_input(self, source)
        for source in inputs:
            source._users[self] = None
        self._inputs = tuple(inputs)
        if op == "call_function" and getattr(target, "__torchgraft_guard__", False):  # `is_guard` written out
            self._mark_inputs()

    # ---- what a node is ----

    @property
    def op(self) -> str:
        """The opcode, one of `OPCODES`."""
        return self._op

    @op.setter
    def op(self, value: str) -> None:
        if value not in OPCODES:
            raise GraphError(
                f"cannot set the opcode of node '{self._name}' to {value!r}: use one of {', '.join(OPCODES)}"
            )
        self._changing()
        self._op = value
        self._mark_inputs()

    @property
    def target(self) -> Any:
        """What is called or fetched: a function, or the name of a method, module, attribute or input."""
        return self._target

    @target.setter
    def target(self, value: Target) -> None:
        self._changing()
        self._target = value
        if getattr(value, "__torchgraft_guard__", False):  # `is_guard` written out: this is asked for every edit
            self._mark_inputs()

    @property
    def name(self) -> str:
        """The name of the value, unique in the graph."""
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        if value == self._name:
            return
        self._changing()
        if not isinstance(value, str):
            raise GraphError(f"cannot rename node '{self._name}' to {value!r}: a name is a string; give one")
        if self.graph._graph_namespace.is_used(value):
            if any(node._name == value for node in self.graph.nodes):
                raise GraphError(
                    f"cannot rename node '{self._name}' to '{value}': the name is taken in this graph; "
                    "take another, or let graph._graph_namespace.create_name() choose"
                )
            self._name = value  # which a node had that was erased or renamed
            return
        # What Python code cannot use as a name becomes one that it can: `cat-3` is `cat_3`.
        self._name = self.graph._graph_namespace.create_name("self_1" if value == "self" else value)

    def _rename(self, candidate: str) -> None:
        """Take a free name as close to `candidate` as possible."""
        if candidate != self._name:
            self._changing()
            self._name = self.graph._graph_namespace.create_name(candidate)

    @property
    def type(self) -> Any:
        """The annotation of the value, written into generated code."""
        return self._type

    @type.setter
    def type(self, value: Any) -> None:
        self._changing()
        self._type = value

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments, immutable; assign a new tuple to change them."""
        return self._args

    @args.setter
    def args(self, value: Sequence[Argument]) -> None:
        self._changing()
        if self._op == "output":
            self.graph._former_results.update(dict.fromkeys(self._inputs))
        self._set_arguments(tuple(value), self._kwargs)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments, immutable; assign a new dict to change them."""
        return self._kwargs

    @kwargs.setter
    def kwargs(self, value: Mapping[str, Argument]) -> None:
        self._changing()
        self._set_arguments(self._args, value)

    @property
    def users(self) -> dict[Node, None]:
        """The nodes that use this one, in the order in which they began to. Guards are not among them, because they only look,
        unless nothing else uses the value: a pass that erases what has no users would erase the check."""
        if not self._guarded:
            return self._users
        return {user: None for user in self._users if not user._is_guard()} or self._users

    def _is_guard(self) -> bool:
        return self._op == "call_function" and is_guard(self._target)

    def _mark_inputs(self) -> None:
        """Let what a guard reads know that it has users who are not counted."""
        if self._is_guard():
            for source in self._inputs:
                source._guarded = True

    @property
    def all_input_nodes(self) -> list[Node]:
        """Every node that the arguments refer to, each once, in the order of first use."""
        return list(self._inputs)

    @property
    def _input_nodes(self) -> dict[Node, None]:
        return dict.fromkeys(self._inputs)

    @property
    def meta(self) -> dict[str, Any]:
        """A dict for whoever has something to say about the node (source line, module path, shapes, …)."""
        result = self._meta
        if result is None:
            result = self._meta = metadata(self._origin)
        return result

    @meta.setter
    def meta(self, value: dict[str, Any]) -> None:
        self._meta = value

    @property
    def stack_trace(self) -> str | None:
        """The user's source line that made this node, as a traceback entry."""
        return self.meta.get("stack_trace")

    @stack_trace.setter
    def stack_trace(self, value: str | None) -> None:
        self.meta["stack_trace"] = value

    # ---- where a node stands ----

    @property
    def next(self) -> Node:
        """The node after this one; after the last comes the graph's root marker, as in torch.fx."""
        return self._next

    @property
    def prev(self) -> Node:
        """The node before this one."""
        return self._prev

    def prepend(self, x: Node) -> None:
        """Move `x`, a node of the same graph, to the place just before this one."""
        self.graph._move(x, self)

    def append(self, x: Node) -> None:
        """Move `x`, a node of the same graph, to the place just after this one."""
        self._changing()
        if x is not self:
            self.graph._move(x, self._next if self._next is not x else x._next)

    def __lt__(self, other: Node) -> bool:
        if self.graph._order_is_stale:
            self.graph._renumber()
        return self._order < other._order

    def __gt__(self, other: Node) -> bool:
        return other < self

    def __le__(self, other: Node) -> bool:
        return self is other or self < other

    def __ge__(self, other: Node) -> bool:
        return self is other or other < self

    # ---- edits ----

    def _changing(self) -> None:
        """Called before every edit: a dead node refuses, a live one marks its graph changed."""
        if self._erased:
            raise GraphError(f"cannot edit node '{self._name}': it was erased from its graph; make a new node instead")
        graph = self.graph
        if graph._fresh:
            graph._invalidate()

    def _set_arguments(self, args: tuple[Argument, ...], kwargs: Mapping[str, Argument]) -> None:
        """The one place where arguments change: freezes them and keeps `users` right on both sides."""
        inputs: dict[Node, None] = {}
        args = freeze_arguments(args, inputs)
        if kwargs is not EMPTY_DICT:
            kwargs = freeze_named(kwargs, inputs)
        graph = self.graph
        for source in inputs:
            if source.graph is not graph or source._erased:
                _refuse_input(self, source)
        for source in self._inputs:
            if source not in inputs:
                source._users.pop(self, None)
        for source in inputs:
            source._users[self] = None
        self._args = args
        self._kwargs = kwargs
        self._inputs = tuple(inputs)
        self._mark_inputs()

    def update_arg(self, idx: int, arg: Argument) -> None:
        """Put `arg` in the place of positional argument `idx`."""
        args = list(self._args)
        if not -len(args) <= idx < len(args):
            raise UnknownArgumentError(
                f"cannot replace argument {idx} of node '{self._name}': it has {len(args)} positional arguments; "
                "give an index below that, or use insert_arg or update_kwarg"
            )
        args[idx] = arg
        self.args = args

    def insert_arg(self, idx: int, arg: Argument) -> None:
        """Insert `arg` before positional argument `idx`."""
        if not 0 <= idx <= len(self._args):
            raise GraphError(
                f"cannot insert an argument at index {idx} of node '{self._name}': "
                f"index must be between 0 and len(self.args) = {len(self._args)}"
            )
        self.args = (*self._args[:idx], arg, *self._args[idx:])

    def update_kwarg(self, key: str, arg: Argument) -> None:
        """Set keyword argument `key` to `arg`."""
        self.kwargs = {**self._kwargs, key: arg}

    def replace_input_with(self, old_input: Node, new_input: Node) -> None:
        """Let every argument that is `old_input` be `new_input`."""
        self._changing()
        self.graph._notify_replace(old_input, new_input, self)
        self._substitute(old_input, new_input)

    def _substitute(self, old: Node, new: Argument) -> None:
        is_only_argument = self._args is self._inputs and self._inputs == (old,)
        if is_only_argument and type(new) is Node and new.graph is self.graph and not new._erased:
            # The one argument is the one input (see __init__): nothing has to be walked.
            old._users.pop(self, None)
            new._users[self] = None
            self._args = self._inputs = (new,)
            return
        self._set_arguments(
            substitute(self._args, old, new),
            substitute(self._kwargs, old, new) if self._kwargs else EMPTY_DICT,
        )

    def replace_all_uses_with(
        self,
        replace_with: Node,
        delete_user_cb: Callable[[Node], bool] | None = None,
        *,
        propagate_meta: bool = False,
    ) -> list[Node]:
        """Let everything that uses this node use `replace_with` instead, and return the users that were changed.

        `delete_user_cb` may keep a user as it is by answering False. `propagate_meta` copies this node's metadata, for
        which `replace_with` must have none of its own. Guards go along, and are not returned; one that stands before
        `replace_with` is moved behind it.
        """
        if self._erased:  # by whoever replaced it before: nothing uses it any more
            return []
        self._changing()
        if propagate_meta:
            if replace_with.meta:
                raise GraphError(
                    f"cannot propagate metadata from node '{self._name}' to '{replace_with._name}', but replace_with "
                    f"already has .meta keys\n  clear them first: {', '.join(replace_with.meta)}"
                )
            replace_with.meta.update(self.meta)
        changed = list(self._users)
        if delete_user_cb is not None:
            changed = [user for user in changed if delete_user_cb(user)]
        hooks = self.graph._hooks
        for user in changed:
            if hooks is not None and hooks.replace:
                self.graph._notify_replace(self, replace_with, user)
            user._substitute(self, replace_with)
        if not self._guarded:
            return changed
        for user in changed:
            if user._is_guard() and not replace_with < user:
                replace_with.append(user)
        return [user for user in changed if not user._is_guard()]

    # ---- questions answered in other rooms ----

    def is_impure(self, impure_random: bool = True) -> bool:
        """Whether the node does more than return a value; see `torchgraft.analysis.effects`."""
        from torchgraft.analysis.effects import is_impure

        return is_impure(self, impure_random)

    def normalized_arguments(
        self,
        root: torch.nn.Module,
        arg_types: tuple[Any, ...] | None = None,
        kwarg_types: dict[str, Any] | None = None,
        normalize_to_only_use_kwargs: bool = False,
    ) -> Any:
        """The arguments bound to the target's signature; see `torchgraft.analysis.signatures`."""
        from torchgraft.analysis.signatures import normalized_arguments

        return normalized_arguments(self, root, arg_types, kwarg_types, normalize_to_only_use_kwargs)

    def format_node(
        self,
        placeholder_names: list[str] | None = None,
        maybe_return_typename: list[str] | None = None,
        *,
        include_tensor_metadata: bool = False,
    ) -> str | None:
        """The node as one line of text."""
        from torchgraft.ir.printing import format_node

        return format_node(self, placeholder_names, maybe_return_typename, include_tensor_metadata)

    @staticmethod
    def _pretty_print_target(target: object) -> str:
        from torchgraft.ir.printing import target_text

        return target_text(target)

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle or copy node '{self._name}' alone: a node belongs to its graph; pickle or copy the graph"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Node:
        # Copying a graph registers its nodes in the memo, so trees that mention them are copied right.
        raise TypeError(f"cannot copy node '{self._name}' alone: copy its graph, or use graph.node_copy()")


def _refuse_input(user: Node, source: Node) -> None:
    if source._erased:
        reason = "it was erased from its graph; use a live node"
    else:
        reason = "it does not belong to this Graph; copy it with graph.node_copy() or graph.graph_copy()"
    raise GraphError(f"cannot use node '{source._name}' as an argument of node '{user._name}': {reason}")


def freeze_arguments(args: tuple[Argument, ...], inputs: dict[Node, None]) -> tuple[Argument, ...]:
    """Make an argument tuple immutable through and through, and collect the nodes in it."""
    for value in args:
        cls = type(value)
        if cls is Node:
            inputs[value] = None
        elif cls not in _LEAVES:
            return tuple([_freeze(item, inputs) for item in args])
    return args


def freeze_named(kwargs: Mapping[str, Argument], inputs: dict[Node, None]) -> dict[str, Argument]:
    """The same for arguments by name."""
    for value in kwargs.values():
        cls = type(value)
        if cls is Node:
            inputs[value] = None
        elif cls not in _LEAVES:
            return immutable_dict([(name, _freeze(item, inputs)) for name, item in kwargs.items()])
    return immutable_dict(kwargs)


def _freeze(value: Any, inputs: dict[Node, None]) -> Any:
    cls = type(value)
    if cls is Node:
        inputs[value] = None
        return value
    if cls in _LEAVES:
        return value
    if cls is tuple:
        return tuple([_freeze(item, inputs) for item in value])
    if cls is slice and type(value.start) in _LEAVES and type(value.stop) in _LEAVES and type(value.step) in _LEAVES:
        return value
    if isinstance(value, tuple):
        return rebuild_tuple(value, [_freeze(item, inputs) for item in value])
    if isinstance(value, list):
        return immutable_list([_freeze(item, inputs) for item in value])
    if isinstance(value, dict):
        return immutable_dict([(key, _freeze(item, inputs)) for key, item in value.items()])
    if isinstance(value, slice):
        return slice(_freeze(value.start, inputs), _freeze(value.stop, inputs), _freeze(value.step, inputs))
    if getattr(cls, "__torchgraft_proxy__", False) is True:  # handed on as it came, by a method of a Transformer say
        return _freeze(value.node, inputs)
    return value


def substitute(value: Any, old: Node, new: Any) -> Any:
    """The same argument tree with `new` wherever `old` was."""
    if value is old:
        return new
    cls = type(value)
    if cls in _LEAVES or cls is Node:
        return value
    if cls is tuple:
        return tuple(
            [new if item is old else item if type(item) is Node else substitute(item, old, new) for item in value]
        )
    return map_aggregate(value, lambda leaf: new if leaf is old else leaf)


def map_arg(a: Argument, fn: Callable[[Node], Argument]) -> Argument:
    """Apply `fn` to every node in an argument tree; everything else stays as it is.

    >>> import torchgraft
    >>> x = torchgraft.Graph().placeholder("x")
    >>> map_arg({"a": [x, 1]}, lambda node: node.name)
    {'a': ['x', 1]}
    """
    if not callable(fn):
        raise GraphError(f"map_arg(a, fn): fn must be a callable, not {type(fn).__name__}")
    if type(a) is Node:
        return fn(a)
    if type(a) is tuple:
        return tuple(
            [fn(item) if type(item) is Node else item if type(item) in _LEAVES else map_arg(item, fn) for item in a]
        )
    return map_aggregate(a, lambda leaf: fn(leaf) if isinstance(leaf, Node) else leaf)
