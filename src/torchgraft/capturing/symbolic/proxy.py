"""Proxies: the objects that run through a model in the place of its values, and record what is done with them.
What becomes of a recorded call is decided by the tracer they carry.
"""

from __future__ import annotations

import copy
import itertools
import operator
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from torchgraft.capturing.patching.active import active
from torchgraft.capturing.user_code.comparisons import asks_nearby, compares_element_types, is_compared_with_none
from torchgraft.errors import GraphError, TraceError
from torchgraft.ir.bytecode import unpacked_length
from torchgraft.ir.guards import check_given
from torchgraft.ir.names import wish_of
from torchgraft.ir.node import Node
from torchgraft.ir.origin import current_source_line, is_user_code, user_instruction

if TYPE_CHECKING:
    from torchgraft.capturing.tracer_base import TracerBase

ARITHMETIC = (
    "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "matmul", "lshift", "rshift", "and_", "or_", "xor",
)  # fmt: skip
IN_PLACE_NAMES = frozenset(name.strip("_") for name in ARITHMETIC)
COMPARISONS = ("eq", "ne", "lt", "gt", "le", "ge")
UNARY = ("neg", "pos", "invert", "abs")


_TENSOR_ATTRIBUTES = frozenset(dir(torch.Tensor))
# Attributes of tensors that mostly are None.
_USUALLY_ABSENT = frozenset({"grad", "_base", "grad_fn"})
# Attributes of tensors that Python code compares by `is`.
_ELEMENT_TYPES = frozenset({"dtype", "layout"})
_ASKED_ABOUT = _USUALLY_ABSENT | _ELEMENT_TYPES


_set = object.__setattr__


class Proxy:
    """A value of the program being traced. Operators, methods, attributes and torch functions on it make nodes.

    >>> import torch, torchgraft
    >>> graph = torchgraft.Graph()
    >>> x = torchgraft.Proxy(graph.placeholder("x"))
    >>> y = torch.relu(x) + 1
    >>> [node.name for node in graph.nodes]
    ['x', 'relu', 'add']
    >>> y.node.args
    (relu, 1)
    """

    node: Node
    tracer: TracerBase
    # Says to a node that takes this as an argument that its own node is meant.
    __torchgraft_proxy__ = True

    def __init__(self, node: Node, tracer: TracerBase | None = None) -> None:
        if tracer is None:
            from torchgraft.capturing.tracer_base import GraphAppendingTracer

            tracer = GraphAppendingTracer(node.graph)
        _set(self, "node", node)  # past our own `__setattr__`, which is for the model
        _set(self, "tracer", tracer)

    def __repr__(self) -> str:
        self._refuse_text()
        return f"Proxy({self.node.name})"

    def __str__(self) -> str:
        self._refuse_text()
        return f"Proxy({self.node.name})"

    def __format__(self, specification: str) -> str:
        if specification and active.tracer is self.tracer:
            self.tracer._refuse_conversion(self, f"a text ('{specification}')")
        self._refuse_text()
        return format(f"Proxy({self.node.name})", specification)

    def _refuse_text(self) -> None:
        if active.tracer is self.tracer and not self.tracer._may_be_text():
            self.tracer._refuse(self, "make a text of", "print or log it in a statement of its own")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        tracer: Any = active.tracer
        if tracer is None or tracer is not getattr(self, "tracer", None):
            return type(self)
        return tracer._class_of(self)  # type: ignore[union-attr]

    def __getattr__(self, name: str) -> Any:
        if name not in _TENSOR_ATTRIBUTES:
            if name in _OWN_ATTRIBUTES:  # a half-made proxy, for example while it is being copied
                raise AttributeError(name)
            if name.startswith("__") or (active.tracer is self.tracer and not self.tracer._has_attribute(self, name)):
                raise AttributeError(name)
            return self._attribute_of_object(name, sys._getframe(1))
        elif name in _ASKED_ABOUT and active.tracer is self.tracer:
            self._refuse_questions(name, sys._getframe(1))
        return Attribute(self, name)

    def _attribute_of_object(self, name: str, frame: FrameType) -> Any:
        """`batch.mask is None` cannot be asked of a proxy, which never is; the program asks when it runs."""
        attribute = Attribute(self, name)
        is_traced = active.tracer is self.tracer and is_user_code(frame.f_code)
        if is_traced and is_compared_with_none(frame.f_code, frame.f_lasti):
            arguments = (attribute, f"{self.node.name}.{name}", str(current_source_line() or "an unknown line"))
            self.tracer.create_proxy("call_function", check_given, arguments, {})
        return attribute

    def _refuse_questions(self, name: str, frame: FrameType) -> None:
        """Raise if the model asks whether an attribute is None, or which dtype it is: a proxy of it is neither."""
        if not is_user_code(frame.f_code):
            return
        if name in _ELEMENT_TYPES and asks_nearby(compares_element_types, frame):
            self.tracer._refuse(self, f"compare by `is` the {name} of", "fix the branch with concrete_args")
        if name == "grad_fn" or (name in _USUALLY_ABSENT and is_compared_with_none(frame.f_code, frame.f_lasti)):
            self.tracer._refuse(self, f"ask for the {name} of", "ask for requires_grad")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", "__call__", (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        item = self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})
        if is_compared_with_none(*user_instruction(2)):
            # `tree["mask"] is None` cannot be asked of a proxy, which never is; the program asks when it runs.
            arguments = (item, f"{self.node.name}[{index!r}]", str(current_source_line() or "an unknown line"))
            self.tracer.create_proxy("call_function", check_given, arguments, {})
        return item

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __delitem__(self, index: Any) -> None:
        self.tracer.create_proxy("call_function", operator.delitem, (self, index), {})

    def __iter__(self) -> Iterator[Any]:
        length = unpacked_length(*user_instruction(2))
        if length is not None:
            return iter([self[index] for index in range(length)])
        return self.tracer.iter(self)

    def __bool__(self) -> bool:
        return self.tracer._records_assertion(self) or self.tracer.to_bool(self)

    def keys(self) -> Any:
        """Called by Python for `**proxy`."""
        return self.tracer.keys(self)

    def __len__(self) -> int:
        return self.tracer._refuse(
            self,
            "take the len() of",
            "mark len as a leaf function: torchgraft.wrap('len')",
            "'len' is not supported in symbolic tracing by default",
        )

    def __int__(self) -> int:
        return self.tracer._refuse_conversion(self, "an int")

    def __index__(self) -> int:
        return self.tracer._refuse_conversion(self, "an index or a range()")

    def __float__(self) -> float:
        return self.tracer._refuse_conversion(self, "a float")

    def __complex__(self) -> complex:
        return self.tracer._refuse_conversion(self, "a complex number")

    def __contains__(self, item: Any) -> bool:
        return self.tracer._refuse(self, "search with `in`", "use (x == value).any()")

    def __array__(self, *args: Any) -> Any:
        return self.tracer._refuse(self, "hand to numpy", "use torch's own functions")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if active.tracer is not self.tracer:
            return self  # somebody copies a structure that holds proxies, after the trace
        result = memo[id(self)] = self.tracer.create_proxy("call_function", copy.deepcopy, (self,), {})
        return result

    def __copy__(self) -> Any:
        if active.tracer is not self.tracer:
            return type(self)(self.node, self.tracer)
        return self.tracer.create_proxy("call_function", copy.copy, (self,), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        if active.tracer is self.tracer:
            self.tracer._refuse(self, "pickle", "hand it on as it is")
        return super().__reduce_ex__(protocol)

    def __hash__(self) -> int:
        if active.tracer is self.tracer and not self.tracer._may_be_key(self):
            self.tracer._refuse(self, "look up", "use torch.where or another tensor operation")
        return id(self)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        # What is written onto a traced value is written when the program runs; a subclass may have attributes of its own.
        if name not in _OWN_ATTRIBUTES and active.tracer is self.tracer and type(self) in (Proxy, Attribute):
            self._assign(name, value)

    def _assign(self, name: str, value: Any) -> None:
        self.tracer.create_proxy("call_function", setattr, (self, name, value), {})

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        proxy = find_proxy((args, kwargs))
        if proxy is None:
            return NotImplemented
        try:
            return record_torch_call(proxy.tracer, orig_method, args, kwargs)
        except GraphError as error:
            others = {id(item.tracer) for item in tree_leaves((args, kwargs)) if isinstance(item, Proxy)}
            if len(others) < 2:
                raise
            raise TraceError(
                f"Found multiple different tracers while trying to trace operations {orig_method}\n"
                "  the values belong to different traces; use those of one"
            ) from error


_reads = itertools.count()


class Attribute(Proxy):
    """An attribute of a traced value; calling it is a method call, using it in any other way fetches it.

    >>> import torchgraft
    >>> graph = torchgraft.symbolic_trace(lambda x: (x.T, x.relu())).graph
    >>> [(node.op, node.args) for node in graph.nodes if node.op.startswith("call")]
    [('call_function', (x, 'T')), ('call_method', (x,))]
    """

    root: Proxy
    attr: str
    _node: Node | None = None
    # Reading happens here, whenever the node is made: what lies between may write the tensor, or switch gradients off.
    _read_after: Node | None = None
    _number = 0

    def __init__(self, root: Proxy, attr: str) -> None:
        tracer = root.tracer
        _set(self, "root", root)
        _set(self, "attr", attr)
        _set(self, "tracer", tracer)
        if active.tracer is tracer:
            _set(self, "_read_after", tracer.graph._root._prev)
            _set(self, "_number", next(_reads))

    @property
    def node(self) -> Node:
        """The node that fetches the attribute, made when it is first needed: most attributes are methods and are called."""
        if self._node is None:
            root = self.root.node
            anchor = self._read_after
            if anchor is None or anchor._erased or anchor is self.tracer.graph._root or anchor < root:
                self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
            else:
                with self.tracer.graph.inserting_after(self._place(anchor)):
                    self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
                self._node.__dict__["_read_number"] = self._number
        return self._node

    @node.setter
    def node(self, value: Node) -> None:
        self._node = value

    def _place(self, anchor: Node) -> Node:
        """After the anchor come the attributes read before this one."""
        following = anchor._next
        while following.__dict__.get("_read_number", self._number) < self._number:
            anchor, following = following, following._next
        return anchor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class ParameterProxy(Proxy):
    """A parameter whose shape is known, so that questions about it can be answered while tracing.

    >>> import torch, torchgraft
    >>> graph = torchgraft.Graph()
    >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
    >>> tracer = torchgraft.proxy.GraphAppendingTracer(graph)
    >>> proxy = torchgraft.ParameterProxy(tracer, graph.get_attr("weight"), "weight", weight)
    >>> proxy.shape, proxy.ndim
    (torch.Size([2, 3]), 2)
    """

    def __init__(self, tracer: TracerBase, node: Node, name: str, param: torch.nn.Parameter) -> None:
        super().__init__(node, tracer)
        self.param = param
        self.name = name

    def __repr__(self) -> str:
        return f"ParameterProxy({self.name})"

    @property
    def shape(self) -> torch.Size:
        """The parameter's own shape."""
        return self.param.shape

    def size(self, *args: Any) -> Any:
        """The parameter's own size."""
        return self.param.size(*args)

    def dim(self) -> int:
        """The parameter's own rank."""
        return self.param.dim()

    @property
    def ndim(self) -> int:
        """The parameter's own rank."""
        return self.param.ndim

    def numel(self) -> int:
        """The parameter's own number of elements."""
        return self.param.numel()

    def nelement(self) -> int:
        """The parameter's own number of elements."""
        return self.param.nelement()

    def __len__(self) -> int:
        return len(self.param)


class ProxyableClassMeta(type):
    """For classes whose construction from traced values should be recorded as a node.

    >>> import torchgraft
    >>> class Pair(metaclass=ProxyableClassMeta):
    ...     def __init__(self, left, right):
    ...         self.left, self.right = left, right
    >>> graph = torchgraft.symbolic_trace(lambda x: Pair(x, x + 1).right).graph
    >>> [node.name for node in graph.nodes]
    ['x', 'add', 'pair', 'getattr_1', 'output']
    """

    def __init__(cls, name: str, bases: tuple[type, ...], attrs: dict[str, Any]) -> None:
        _proxyable_classes[cls] = None
        super().__init__(name, bases, attrs)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        proxy = find_proxy((args, kwargs))
        if proxy is None:
            return super().__call__(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", cls, args, kwargs)


_proxyable_classes: dict[type, None] = {}


def find_proxy(value: Any) -> Proxy | None:
    """The first proxy in a tree of containers."""
    if isinstance(value, Proxy):
        return value
    if isinstance(value, (tuple, list)):
        items: Any = value
    elif isinstance(value, dict):
        items = value.values()
    elif isinstance(value, slice):
        items = (value.start, value.stop, value.step)
    else:
        return None
    for item in items:
        found = find_proxy(item)
        if found is not None:
            return found
    return None


# How calls of a torch function are recorded: as (opcode, target). Methods are reported as the functions behind them.
_opcodes: dict[Any, tuple[str, Any]] = {}


def record_torch_call(tracer: TracerBase, function: Any, args: Any, kwargs: Any) -> Any:
    """Record a call that torch's override protocol reported."""
    known = _opcodes.get(function)
    if known is not None:
        return _recorded(tracer, *known, args, kwargs)
    if isinstance(function, torch._C.ScriptMethod):
        return tracer.create_proxy("call_method", function.name, (function.owner, *args), kwargs)
    name = getattr(function, "__name__", None)
    if torch.overrides.is_tensor_method_or_property(function):
        if name == "__get__":
            # Property descriptors carry the attribute's name only through the getter they belong to.
            return getattr(args[0], function.__self__.__name__)
        known = "call_method", name
    else:
        known = "call_function", function
    if len(_opcodes) < 20_000:
        _opcodes[function] = known
    return _recorded(tracer, *known, args, kwargs)


def _recorded(tracer: TracerBase, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
    if tracer._sees_calls and kind == "call_function":  # an overridden method is told the name, as in torch.fx
        return tracer.create_proxy(kind, target, args, kwargs, name=wish_of(target))
    return tracer.create_proxy(kind, target, args, kwargs)


def _add_operator(name: str, reflected: bool = False) -> None:
    function = getattr(operator, name)
    # `y += x` often turns out to be `y + x` (see inplace.py), and torch.fx calls it so; it has that name from the start.
    wish = name.removeprefix("i") if f"{name.removeprefix('i')}" in IN_PLACE_NAMES and name not in ARITHMETIC else None
    plain: Any = None if wish is None else getattr(operator, wish if hasattr(operator, wish) else f"{wish}_")

    if reflected:

        def method(self: Proxy, other: Any) -> Any:
            return self.tracer.create_proxy("call_function", function, (other, self), {})

        python_name = f"__r{name.strip('_')}__"
    else:

        def method(self: Proxy, *others: Any) -> Any:  # type: ignore[misc]
            if wish is None:
                return self.tracer.create_proxy("call_function", function, (self, *others), {})
            if not self.tracer._sees_calls:
                return self.tracer.create_proxy("call_function", function, (self, *others), {}, name=wish)
            # A tracer of somebody's own gets the operator that torch.fx records: it may look it up, or compute with it.
            result = self.tracer.create_proxy("call_function", plain, (self, *others), {})
            if isinstance(result, Proxy) and result.node.target is plain:
                result.node.target = function
            return result

        python_name = f"__{name.strip('_')}__"
    method.__name__ = python_name
    setattr(Proxy, python_name, method)


def _add_writable_attribute(name: str) -> None:
    """Reading it is like reading any attribute; writing it writes into the tensor, which must happen in the program too."""

    def read(self: Proxy) -> Attribute:
        if active.tracer is self.tracer and name in _ASKED_ABOUT:
            self._refuse_questions(name, sys._getframe(1))
        return Attribute(self, name)

    setattr(
        Proxy,
        name,
        property(read, lambda self, value: self._assign(name, value)),
    )


_WRITABLE = ("data", "grad", "requires_grad", "real", "imag")
_OWN_ATTRIBUTES = frozenset({"node", "tracer", "root", "attr", "_node", "_read_after", "_number", *_WRITABLE})
for _name in _WRITABLE:
    _add_writable_attribute(_name)
for _name in (*ARITHMETIC, *COMPARISONS, *UNARY):
    _add_operator(_name)
for _name in ARITHMETIC:
    _add_operator(_name, reflected=True)
for _name in ARITHMETIC:
    _add_operator(f"i{_name.strip('_')}")


__all__ = [
    "Attribute",
    "ParameterProxy",
    "Proxy",
    "ProxyableClassMeta",
    "TraceError",
    "find_proxy",
    "record_torch_call",
]
