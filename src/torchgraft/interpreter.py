"""Interpreter runs a graph node by node, Transformer rewrites one the same way; each has one method per opcode to override.
Running without overrides is faster through the generated code of a GraphModule.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchgraft.capturing.symbolic.proxy import Proxy
from torchgraft.capturing.symbolic.tracer import Tracer
from torchgraft.capturing.tracer_base import overrides
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.arguments import map_aggregate
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import _LEAVES, Argument, Node, Target, map_arg
from torchgraft.ir.verify import find_attribute
from torchgraft.results.tables import count

_WAYS_TO_FETCH = frozenset({"fetch_args_kwargs_from_env", "map_nodes_to_values", "fetch_attr"})


class Interpreter:
    """Runs a graph node by node.

    Override `run_node` to see every node, or the method of an opcode to change what it does. `env` holds the values
    computed so far; with `garbage_collect_values` each is dropped after its last use.

    >>> import torch, torchgraft
    >>> class Log(Interpreter):
    ...     def call_function(self, target, args, kwargs):
    ...         result = super().call_function(target, args, kwargs)
    ...         print(target.__name__, result)
    ...         return result
    >>> Log(torchgraft.symbolic_trace(lambda x: torch.relu(x) + 1)).run(torch.tensor(-2.0))
    relu tensor(0.)
    add tensor(1.)
    tensor(1.)
    """

    # Whether a subclass has a say in how the values of arguments, or the modules that are called, are found.
    _fetches_otherwise = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._fetches_otherwise = overrides(cls, Interpreter, _WAYS_TO_FETCH)

    def __init__(
        self, module: torch.nn.Module, garbage_collect_values: bool = True, graph: Graph | None = None
    ) -> None:
        self.module = module
        self.graph: Graph = graph if graph is not None else module.graph  # type: ignore[assignment]
        self.env: dict[Node, Any] = {}
        self.name = "Interpreter"
        self.garbage_collect_values = garbage_collect_values
        self.extra_traceback = True

    @functools.cached_property
    def submodules(self) -> dict[str, torch.nn.Module]:
        """Every module by its dotted path."""
        return dict(self.module.named_modules())

    @functools.cached_property
    def user_to_last_uses(self) -> dict[Node, list[Node]]:
        """For each node the values that nobody needs after it."""
        from torchgraft.codegen.source import last_uses

        return last_uses(self.graph)

    # ---- running ----

    def run(self, *args: Any, initial_env: dict[Node, Any] | None = None, enable_io_processing: bool = True) -> Any:
        """Run the graph on `args` and return its result. Values in `initial_env` are taken as given."""
        self.env = initial_env if initial_env is not None else {}
        if enable_io_processing:
            args = self.graph.process_inputs(*args)
        self.args_iter = iter(args)
        return self._run(enable_io_processing)

    def boxed_run(self, args_list: list[Any]) -> Any:
        """Run the graph on a list that is emptied at once, so that inputs can be freed while the program runs."""
        inputs = [node for node in self.graph.nodes if node._op == "placeholder"]
        if len(inputs) != len(args_list):
            detail = "extra arguments" if len(args_list) > len(inputs) else "missing arguments"
            raise GraphError(
                f"boxed_run got {count(len(args_list), 'value')} for {count(len(inputs), 'input')} ({detail}); give one for each"
            )
        self.env = dict(zip(inputs, args_list, strict=True))
        args_list.clear()
        return self._run(False)

    def _run(self, enable_io_processing: bool) -> Any:
        env, run_node = self.env, self.run_node
        frees = self.user_to_last_uses if self.garbage_collect_values else {}
        contexts: list[Any] = []
        try:
            for node in self.graph.nodes:
                if node in env:
                    continue
                env[node] = result = run_node(node)
                target = node._target
                if target is enter_context:
                    contexts.append(result)
                elif target is exit_context:
                    contexts.pop()
                elif node._op == "output":
                    return self.graph.process_outputs(result) if enable_io_processing else result
                for used in frees.get(node, ()):
                    env.pop(used, None)
        except BaseException as error:
            for context in reversed(contexts):
                if hasattr(context, "__exit__"):
                    context.__exit__(type(error), error, error.__traceback__)
            if self.extra_traceback and isinstance(error, Exception):
                _annotate(error, node)
            raise
        return None

    def run_node(self, n: Node) -> Any:
        """Compute the value of one node from the values in `env`."""
        if self._fetches_otherwise:
            return getattr(self, n._op)(n._target, *self.fetch_args_kwargs_from_env(n))
        env = self.env
        args: Any = n._args
        try:
            if args is n._inputs:
                args = tuple([env[a] for a in args])
            else:
                args = tuple(
                    [
                        env[a] if type(a) is Node else a if type(a) in _LEAVES else map_arg(a, env.__getitem__)
                        for a in args
                    ]
                )
            kwargs = map_arg(n._kwargs, env.__getitem__) if n._kwargs else {}
        except KeyError:
            self.fetch_args_kwargs_from_env(n)  # raises, naming what is missing
            raise
        return getattr(self, n._op)(n._target, args, kwargs)

    # ---- one method per opcode ----

    def placeholder(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """The next input, or its default."""
        if isinstance(target, str) and target.startswith("**"):
            return next(self.args_iter, {})
        if isinstance(target, str) and target.startswith("*"):
            return tuple(self.args_iter)  # as Python does, which guards of captured programs ask about
        try:
            return next(self.args_iter)
        except StopIteration:
            if args:
                return args[0]
            raise GraphError(
                f"Expected positional argument for parameter {target}, but one was not passed in! Give a value for every "
                "input without a default"
            ) from None

    def get_attr(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """An attribute of the module."""
        return self.fetch_attr(target)  # type: ignore[arg-type]

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function."""
        return target(*args, **kwargs)  # type: ignore[operator]

    def call_method(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a method of the first argument."""
        return getattr(args[0], target)(*args[1:], **kwargs)  # type: ignore[arg-type]

    def call_module(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a submodule."""
        module = None if self._fetches_otherwise else self.module._modules.get(target)  # type: ignore[arg-type]
        if module is None:
            module = self.fetch_attr(target)  # type: ignore[arg-type]
        return module(*args, **kwargs)

    def output(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """What the program returns."""
        return args[0]

    # ---- values ----

    def fetch_attr(self, target: str) -> Any:
        """The attribute of the module at a dotted path."""
        value, reason = find_attribute(self.module, target)
        if reason is not None:
            raise GraphError(f"Node referenced nonexistent target {target}: {reason}; add it to the module")
        return value

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The values of a node's arguments."""
        return self.map_nodes_to_values(n._args, n), self.map_nodes_to_values(n._kwargs, n)

    def map_nodes_to_values(self, args: Argument, n: Node) -> Any:
        """An argument tree with values in the place of nodes."""

        def value_of(source: Node) -> Any:
            if source not in self.env:
                raise GraphError(
                    f"Node {n._name} referenced nonexistent value {source._name}! Run Graph.lint() to diagnose such issues"
                )
            return self.env[source]

        return map_arg(args, value_of)


def _annotate(error: Exception, node: Node) -> None:
    note = f"While executing {node.format_node()}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
        if node.stack_trace:
            error.add_note(f"made from\n{node.stack_trace.rstrip()}")


class TransformerTracer(Tracer):
    """Records the nodes of a new graph; lines of the transform itself are no source lines of the model."""

    record_stack_traces = False

    def __init__(self, graph: Graph, root: torch.nn.Module) -> None:
        super().__init__()
        self.root = root
        self.graph = graph

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Every module call stays one."""
        return True


class Transformer(Interpreter):
    """Makes a new program out of an old one: override the method of an opcode and return something else.

    Metadata of a node goes to everything its method makes.

    >>> import torch, torchgraft
    >>> class ReluToTanh(Transformer):
    ...     def call_function(self, target, args, kwargs):
    ...         target = torch.tanh if target is torch.relu else target
    ...         return super().call_function(target, args, kwargs)
    >>> ReluToTanh(torchgraft.symbolic_trace(lambda x: torch.relu(x))).transform()(torch.tensor(0.0))
    tensor(0.)
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.new_graph = Graph(tracer_cls=module.graph._tracer_cls)
        self.new_graph._codegen = module.graph._codegen
        self.new_graph._constants = module.graph._constants
        self.tracer = TransformerTracer(self.new_graph, module)

    def run_node(self, n: Node) -> Any:
        """Transform one node and hand its metadata on."""
        last = self.new_graph._root._prev
        result = super().run_node(n)
        made = last._next
        while made is not self.new_graph._root:
            if made._origin is None and made._meta is None:
                made._origin = n._origin
                made._meta = None if n._meta is None else dict(n._meta)
            if made._type is None and made._op == n._op and made._target == n._target:
                made._type = n._type
            made = made._next
        # A method may have made a node itself, and the methods of the nodes after it want to compute with its value.
        return Proxy(result, self.tracer) if isinstance(result, Node) else result

    def placeholder(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """An input of the new program."""
        default = {"default_value": args[0]} if args else {}
        return Proxy(self.new_graph.placeholder(target, **default), self.tracer)  # type: ignore[arg-type]

    def get_attr(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """A fetch in the new program."""
        return self.tracer.create_proxy("get_attr", target, args, kwargs)

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """A call in the new program."""
        return self.tracer.create_proxy("call_function", target, args, kwargs)

    def call_method(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """A method call in the new program."""
        return self.tracer.create_proxy("call_method", target, args, kwargs)

    def call_module(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """A module call in the new program."""
        return self.tracer.create_proxy("call_module", target, args, kwargs)

    def transform(self) -> GraphModule:
        """Run the transformation and return the new program over the same parameters."""
        result = self.run(enable_io_processing=False)
        old = next((node for node in reversed(self.graph.nodes) if node._op == "output"), None)
        if old is not None:
            value = map_aggregate(result, lambda leaf: leaf.node if isinstance(leaf, Proxy) else leaf)
            node = self.new_graph.output(value, old._type)
            node._origin, node._meta = old._origin, None if old._meta is None else dict(old._meta)
        return GraphModule(self.module, self.new_graph, type(self.module).__name__)


__all__ = ["Interpreter", "Transformer", "TransformerTracer"]
