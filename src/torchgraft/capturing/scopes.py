"""Where a tracer is: the module whose forward is being traced, those around it, and which node was made in which.
What becomes of it in a node's metadata is in `ir/origin.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.ir.origin import Scope as ScopeChain
from torchgraft.ir.origin import module_stack


class Scope:
    """The module whose forward is being traced."""

    def __init__(self, module_path: str, module_type: Any) -> None:
        self.module_path = module_path
        self.module_type = module_type


class ScopeContextManager:
    """Lets a scope be another one until the `with` block ends."""

    def __init__(self, scope: Scope, current_scope: Scope) -> None:
        self._scope = scope
        self._previous = Scope(scope.module_path, scope.module_type)
        scope.module_path, scope.module_type = current_scope.module_path, current_scope.module_type

    def __enter__(self) -> Scope:
        return self._scope

    def __exit__(self, *details: object) -> None:
        self._scope.module_path, self._scope.module_type = self._previous.module_path, self._previous.module_type


def _place(scope: ScopeChain | None) -> tuple[str, Any]:
    return ("", None) if scope is None else (scope[2], scope[3])


class ScopeState:
    """Three objects that a tracer has in torch.fx, where subclasses change and replace them. Here they are made when somebody
    asks, and kept up to date from then on."""

    graph: Graph
    _scope_chain: ScopeChain | None = None
    # What a subclass has asked for or set; see `_keep_up_to_date`.
    _scope: Any = None
    _module_stack: dict[str, tuple[str, Any]] | None = None
    _node_scopes: dict[str, tuple[str, Any]] | None = None
    # Whether a user's subclass has a say in how a call becomes a node; create_proxy is three times as fast where not.
    _is_overridden = False

    @property
    def scope(self) -> Scope:
        """The innermost module whose forward is running."""
        if self._scope is None:
            self.scope = Scope(*_place(self._scope_chain))
        return self._scope

    @scope.setter
    def scope(self, value: Scope) -> None:
        self._scope = value
        self._keep_up_to_date()

    @property
    def module_stack(self) -> dict[str, tuple[str, Any]]:
        """The modules whose forwards are running, outermost first."""
        if self._module_stack is None:
            self.module_stack = OrderedDict(module_stack(self._scope_chain))
        return self._module_stack  # type: ignore[return-value]

    @module_stack.setter
    def module_stack(self, value: dict[str, tuple[str, Any]]) -> None:
        self._module_stack = value
        self._keep_up_to_date()

    @property
    def node_name_to_scope(self) -> dict[str, tuple[str, Any]]:
        """For each node made so far the path and type of the module it was made in."""
        if self._node_scopes is None:
            nodes = self.graph.nodes if hasattr(self, "graph") else ()
            self.node_name_to_scope = {node._name: _place(node._origin[2] if node._origin else None) for node in nodes}
        return self._node_scopes  # type: ignore[return-value]

    @node_name_to_scope.setter
    def node_name_to_scope(self, value: dict[str, tuple[str, Any]]) -> None:
        self._node_scopes = value
        self._keep_up_to_date()

    def _keep_up_to_date(self) -> None:
        """From now on every node is made by `create_node`, and every module called by `call_module`."""
        self._is_overridden = True

    def _enter_scope(self, path: str, kind: type, key: str) -> tuple[str, Any]:
        before = _place(self._scope_chain)
        self._scope_chain = (self._scope_chain, key, path, kind)
        if self._scope is not None:
            before = self._scope.module_path, self._scope.module_type
            self._scope.module_path, self._scope.module_type = path, kind
        if self._module_stack is not None:
            self._module_stack[key] = (path, kind)
        return before

    def _leave_scope(self, before: tuple[str, Any]) -> None:
        outer, key, _, _ = self._scope_chain  # type: ignore[misc]
        self._scope_chain = outer
        if self._scope is not None:
            self._scope.module_path, self._scope.module_type = before
        if self._module_stack is not None:
            self._module_stack.pop(key, None)

    def _note_scope(self, node: Node) -> None:
        if self._node_scopes is not None:
            self._node_scopes[node._name] = self.scope.module_path, self.scope.module_type
        if self._module_stack:
            node.meta["nn_module_stack"] = dict(self._module_stack)
