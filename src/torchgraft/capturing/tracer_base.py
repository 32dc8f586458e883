"""TracerBase: how a recorded call becomes a node, how a Python value becomes an argument, and what is refused.
Running a model with proxies is the business of `tracer.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from torchgraft.capturing.refusals import LEAF, ConversionError, UnsupportedArgument, in_lines
from torchgraft.capturing.scopes import Scope as Scope
from torchgraft.capturing.scopes import ScopeContextManager as ScopeContextManager
from torchgraft.capturing.scopes import ScopeState
from torchgraft.capturing.symbolic.proxy import Attribute, Proxy, find_proxy
from torchgraft.errors import TraceError
from torchgraft.ir.arguments import EMPTY_DICT, immutable_dict, immutable_list, rebuild_tuple
from torchgraft.ir.bytecode import is_assertion
from torchgraft.ir.graph import Graph
from torchgraft.ir.names import wish_of
from torchgraft.ir.node import Argument, Node, Target
from torchgraft.ir.origin import at, current_source_line, source_line, user_instruction

BASE_TYPES = (
    str, int, float, bool, complex, bytes, torch.dtype, torch.device, torch.memory_format, torch.layout,
)  # fmt: skip
UNCHANGED_TYPES = frozenset({*BASE_TYPES, type(None), type(Ellipsis)})
_MAKERS_OF_NODES = frozenset({"check_mutable_operations", "create_arg", "create_node", "proxy"})
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)


_new = object.__new__
_set = object.__setattr__


def assert_traced(condition: Any) -> None:
    """What an `assert` on a traced value becomes when a tracer has `trace_asserts` set."""
    if not condition:
        raise AssertionError("an assertion of the traced program failed")


assert_traced.__torchgraft_effect__ = True  # type: ignore[attr-defined]


def overrides(cls: type, ancestor: type, names: frozenset[str]) -> bool:
    """Whether a class has other attributes of these names than its ancestor, its own or those of a class mixed in."""
    return any(not names.isdisjoint(vars(base)) for base in cls.__mro__ if base not in ancestor.__mro__)


class TracerBase(ScopeState):
    """What every tracer can do: make nodes, proxies and arguments. Override the methods to change what is recorded.

    >>> import torchgraft
    >>> class TakesTheFirstBranch(torchgraft.Tracer):
    ...     def to_bool(self, value):
    ...         return True
    >>> graph = TakesTheFirstBranch().trace(lambda x: x if x > 0 else -x)
    >>> [node.name for node in graph.nodes]
    ['x', 'gt', 'output']
    """

    graph: Graph
    record_stack_traces: bool = True
    check_mutable_operations: bool = False
    trace_asserts: bool = False
    proxy_buffer_attributes: bool = False
    traced_func_name: str = "forward"
    # Whether reading a submodule gives the submodule: no subclass has a `getattr` of its own.
    _default_getattr = True
    # Inputs that may be None and that nobody has asked about.
    _optional_inputs: Mapping[Node, str] = {}
    # Whether the traced program runs on real tensors (a watched run) and not on proxies.
    _runs_for_real = False
    # Whether `self.training` is handed out as a plain bool, with a guard.
    flags_are_plain = False
    # Whether an object was handed out in the place of a mode or a dtype.
    _has_stand_ins = False
    # Whether a user's subclass looks at what is recorded.
    _sees_calls = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._is_overridden = overrides(cls, TracerBase, _MAKERS_OF_NODES)
        cls._sees_calls = overrides(cls, TracerBase, frozenset({"create_proxy", "create_node"}))

    # ---- nodes and proxies ----

    def create_node(
        self,
        kind: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        name: str | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Put a node in the graph. Override to attach metadata or to refuse operations."""
        if self.check_mutable_operations and kind == "call_function":
            _refuse_mutation(target, args, kwargs)
        node = self.graph._make_node(kind, target, args, kwargs, name or wish_of(target), type_expr)
        self._note_origin(node, kind)
        return node

    def _note_origin(self, node: Node, kind: str) -> None:
        if self.record_stack_traces and kind != "placeholder":
            node._origin = (*user_instruction(3), self._scope_chain)
        elif self._scope_chain is not None:
            node._origin = (None, 0, self._scope_chain)
        self._note_scope(node)

    def proxy(self, node: Node) -> Proxy:
        """The proxy of a node."""
        return Proxy(node, self)

    def create_proxy(
        self,
        kind: str,
        target: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Callable[[Node], Proxy] | None = None,
    ) -> Proxy:
        """Record a call: lower its arguments, make the node, return its proxy."""
        if not self._is_overridden and proxy_factory_fn is None and type(args) is tuple:
            return self._record(kind, target, args, kwargs, name, type_expr)
        create = self.create_arg
        node = self.create_node(kind, target, create(args), create(kwargs), name, type_expr)
        return self.proxy(node) if proxy_factory_fn is None else proxy_factory_fn(node)

    def _record(
        self,
        kind: str,
        target: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        depth: int = 3,
    ) -> Proxy:
        """`create_proxy` with the calls of our own methods written out, because this is most of the time that tracing takes.
        The user's line is at least `depth` frames away."""
        if len(args) == 1 and type(args[0]) is Proxy:
            lowered: tuple[Argument, ...] = (args[0].node,)
        else:
            create, items = self.create_arg, []
            for a in args:  # no comprehension: it would be one call more
                cls = type(a)
                items.append(a.node if cls is Proxy else a if cls in UNCHANGED_TYPES else create(a))
            lowered = tuple(items)
        named: dict[str, Argument] = EMPTY_DICT
        if kwargs:
            named = {}
            for key, a in kwargs.items():
                cls = type(a)
                named[key] = a.node if cls is Proxy else a if cls in UNCHANGED_TYPES else self.create_arg(a)
        node = self.graph._make_node(kind, target, lowered, named, name or wish_of(target), type_expr)
        if self.record_stack_traces and kind != "placeholder":
            code, instruction = user_instruction(depth)
            node._origin = code, instruction, self._scope_chain
        proxy = _new(Proxy)  # `Proxy(node, self)` written out
        _set(proxy, "node", node)
        _set(proxy, "tracer", self)
        return proxy

    # ---- arguments ----

    def create_arg(self, a: Any) -> Argument:
        """Turn a Python value into an argument of a node. Override to allow more types."""
        cls = type(a)
        if cls is Proxy:
            return a.node
        if cls in UNCHANGED_TYPES:
            return a
        create = self.create_arg
        if cls is tuple:
            return tuple([create(item) for item in a])
        if cls is list:
            return immutable_list([create(item) for item in a])
        if cls is slice:
            return slice(create(a.start), create(a.stop), create(a.step))
        return a.node if issubclass(cls, Proxy) else self._create_unusual_arg(a)

    def _create_unusual_arg(self, a: Any) -> Argument:
        create = self.create_arg
        if hasattr(a, "__fx_create_arg__"):
            return a.__fx_create_arg__(self)
        if isinstance(a, tuple):
            items = [create(item) for item in a]
            if hasattr(a, "_fields"):
                return rebuild_tuple(a, items)
            return type(a)(items) if not any(isinstance(item, Node) for item in items) else tuple(items)
        if isinstance(a, list):
            return immutable_list([create(item) for item in a])
        if type(a) in (OrderedDict, defaultdict):
            pairs = [(self._create_key(key), create(value)) for key, value in a.items()]
            first = (create(a.default_factory),) if isinstance(a, defaultdict) else ()
            return self.create_node("call_function", type(a), (*first, pairs), {})
        if isinstance(a, dict):
            return immutable_dict([(self._create_key(key), create(value)) for key, value in a.items()])
        if isinstance(a, slice):
            return slice(create(a.start), create(a.stop), create(a.step))
        if isinstance(a, range):
            return range(create(a.start), create(a.stop), create(a.step))
        if isinstance(a, (*BASE_TYPES, *_OPERATORS, enum.Enum, Node, type)) or a is None or a is ...:
            return a
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            fields = {field.name: create(getattr(a, field.name)) for field in dataclasses.fields(a) if field.init}
            return self.create_node("call_function", type(a), (), fields)
        if isinstance(a, torch.SymInt | torch.SymFloat | torch.SymBool):
            return a
        text = in_lines(
            f"argument of type: {type(a)} cannot be part of a traced program",
            current_source_line(),
            "pass numbers, strings, tensors and containers of them, give the class an __fx_create_arg__ method, or override "
            "Tracer.create_arg",
        )
        raise self._remembered(UnsupportedArgument(text))

    def _create_key(self, key: Any) -> Any:
        if isinstance(key, str):
            return key
        if find_proxy(key) is not None:
            what = f"Keys for dictionaries used as an argument cannot contain a Node. Got key: {key!r}"
            raise TraceError(in_lines(what, current_source_line(), "use strings or numbers as keys"))
        return self.create_arg(key)

    # ---- what a traced value cannot do ----

    def _records_assertion(self, value: Proxy) -> bool:
        """Whether a question was that of an `assert`, and has been recorded."""
        if not self.trace_asserts or not is_assertion(*user_instruction(2)):
            return False
        self.create_proxy("call_function", assert_traced, (value,), {})
        return True

    def to_bool(self, obj: Proxy) -> bool:
        """Called when a traced value decides something (`if`, `and`, `while`). Override to answer from other knowledge."""
        self._refuse(
            obj,
            "branch on",
            "use torch.where or another tensor operation, fix the value with concrete_args",
            "symbolically traced variables cannot be used as inputs to control flow",
        )

    def iter(self, obj: Proxy) -> Iterator[Any]:
        """Called when a traced value is iterated over, other than for unpacking (`a, b = value`), whose length is known."""
        self._refuse(
            obj,
            "iterate over",
            "unpack it into a fixed number of names, index it",
            "Proxy object cannot be iterated, because how many steps there are is not known while tracing",
        )

    def _refuse_conversion(self, proxy: Proxy, purpose: str) -> NoReturn:
        remedy = (
            "keep it a tensor, fix the value with concrete_args, mark the function it is passed to with torchgraft.wrap"
        )
        self._refuse(proxy, f"make {purpose} of", remedy, kind=ConversionError)

    def keys(self, obj: Proxy) -> Any:
        """Called for `**value`."""
        return Attribute(obj, "keys")()

    def _refuse(
        self, proxy: Proxy, action: str, remedy: str, reason: str = "", kind: type[TraceError] = TraceError
    ) -> NoReturn:
        node, line = proxy.node, current_source_line()
        made = source_line(node._origin[0], node._origin[1]) if node._origin else None
        maker = "an input of the program" if node._op == "placeholder" else f"made by {node.format_node()}"
        text = in_lines(
            f"cannot {action} a traced value: node '{node._name}'",
            line,
            f"the value is {maker}" + ("" if node._op == "placeholder" or made == line else at(made)),
            reason,
            "use torchgraft.capture(model, args), which runs the model on example inputs",
            f"or {remedy}, or {LEAF}",
        )
        raise self._remembered(kind(text))

    # ---- questions about a traced value that cannot be recorded; `Tracer` has answers ----

    def _class_of(self, proxy: Proxy) -> type:
        return type(proxy)

    def _has_attribute(self, proxy: Proxy, name: str) -> bool:
        return True

    def _may_be_text(self) -> bool:
        return True

    def _may_be_key(self, proxy: Proxy) -> bool:
        return True

    def _remembered(self, error: TraceError) -> TraceError:
        """A forward may catch what we raise and go on another way; the trace is no good all the same."""
        return error


def _refuse_mutation(target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    packet = getattr(torch.ops.aten, getattr(target, "__name__", ""), None)
    names = packet.overloads() if packet is not None and not isinstance(target, str) else []
    if names and any(getattr(packet, name)._schema.is_mutable for name in names) and target.__name__.endswith("_"):  # type: ignore[union-attr]
        what = f"Tried to trace mutable operation {target.__name__}: check_mutable_operations is set"  # type: ignore[union-attr]
        raise TraceError(in_lines(what, current_source_line(), "use the out-of-place form"))


class GraphAppendingTracer(TracerBase):
    """Records onto a graph that already exists; what `Proxy(node)` uses."""

    record_stack_traces = False

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
