"""Calling Python functions by reading their source: arguments to parameters, then the body. This completes the machine.
What the statements of a body do is said in `statements.py`.
"""

from __future__ import annotations

import ast
import types
from typing import Any

from torchgraft.analysis.effects.expressions import Scope
from torchgraft.analysis.effects.machine import DEPTH_LIMIT, Arguments
from torchgraft.analysis.effects.programs import Programs
from torchgraft.analysis.effects.source import function_tree
from torchgraft.analysis.effects.statements import Body
from torchgraft.analysis.effects.values import OUTSIDE, Closure, Value, covers, join, lift, reachable


class Analysis(Programs):
    """The whole machine."""

    def call_python(self, site: Any, function: types.FunctionType, arguments: Arguments) -> Value:
        tree = function_tree(function.__code__)
        if tree is None:
            self.give_up(f"the source of {function.__qualname__} is not there")
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        scope = Scope(function.__globals__, cells)
        defaults = [lift(default, OUTSIDE) for default in function.__defaults__ or ()]
        named = {name: lift(default, OUTSIDE) for name, default in (function.__kwdefaults__ or {}).items()}
        return self._run_body(site, function.__code__, tree, scope, arguments, defaults, named)

    def call_closure(self, site: Any, closure: Closure, arguments: Arguments) -> Value:
        tree, outer = closure.tree, closure.frame.scope
        scope = Scope(outer.namespace, outer.cells, outer)
        named = {
            parameter.arg: default
            for parameter, default in zip(tree.args.kwonlyargs, closure.keyword_defaults, strict=True)
            if default is not None
        }
        return self._run_body(site, tree, tree, scope, arguments, list(closure.defaults), named, closure.frame)

    def _run_body(
        self,
        site: Any,
        code: Any,
        tree: ast.FunctionDef | ast.Lambda,
        scope: Scope,
        arguments: Arguments,
        defaults: list[Value],
        named: dict[str, Value],
        outer: Body | None = None,
    ) -> Value:
        path = (site, code)
        if not self._bind_parameters(path, tree.args, scope, arguments, defaults, named):
            self.give_up("the arguments do not fit the function")
        for active, names in self.active:
            if active is code and all(
                covers(names.get(name, Value(None)), value) for name, value in scope.names.items()
            ):
                # The body is being read with arguments like these already; reading it again would find nothing new.
                return self.unknown_result(scope.names.values())
        if len(self.active) >= DEPTH_LIMIT:
            self.give_up("calls nest too deep to follow")
        body = Body(self, scope, path)
        body.outer = outer
        self.active.append((code, dict(scope.names)))
        try:
            if isinstance(tree, ast.Lambda):
                return body.evaluate(tree.body)
            if body.run(tree.body):
                body.returned.append(Value(None))
        finally:
            self.active.pop()
        if body.yielded is not None:
            return self.make((path, "yields"), [Value(places=reachable(body.yielded))])
        result = body.returned[0] if body.returned else Value(None)
        for value in body.returned[1:]:
            result = join(result, value)
        return result

    def _bind_parameters(
        self,
        path: Any,
        parameters: ast.arguments,
        scope: Scope,
        arguments: Arguments,
        defaults: list[Value],
        named: dict[str, Value],
    ) -> bool:
        names = [parameter.arg for parameter in (*parameters.posonlyargs, *parameters.args)]
        bound = scope.names
        bound.update(zip(names, arguments.positional, strict=False))
        scope.receiver = bound.get(names[0]) if names else None
        surplus = arguments.positional[len(names) :]
        extra = {}
        keyword_only = [parameter.arg for parameter in parameters.kwonlyargs]
        for name, value in arguments.keyword.items():
            if name in names or name in keyword_only:
                bound[name] = value
            else:
                extra[name] = value
        fallback = {**dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)), **named}
        for name in (*names, *keyword_only):
            if name in bound:
                continue
            if arguments.rest is not None:
                # A star of unknown length may or may not reach this parameter.
                rest = Value(places=reachable((arguments.rest,)))
                bound[name] = join(rest, fallback[name]) if name in fallback else rest
            elif name in fallback:
                bound[name] = fallback[name]
            else:
                return False
        return self._bind_stars(path, parameters, scope, surplus, extra, arguments.rest)

    def _bind_stars(
        self,
        path: Any,
        parameters: ast.arguments,
        scope: Scope,
        surplus: list[Value],
        extra: dict[str, Value],
        rest: Value | None,
    ) -> bool:
        if (surplus and parameters.vararg is None) or (extra and parameters.kwarg is None):
            return False
        if parameters.vararg is not None:
            key = (path, "args")
            star = (
                self.make(key, [*surplus, rest], tuple) if rest is not None else self.make_sequence(key, surplus, tuple)
            )
            scope.names[parameters.vararg.arg] = star
        if parameters.kwarg is not None:
            key = (path, "kwargs")
            named = (
                self.make(key, [*extra.values(), rest], dict)
                if rest is not None
                else self.make_mapping(key, extra, dict)
            )
            scope.names[parameters.kwarg.arg] = named
        return True
