"""Which node of a wrong program is the first to differ from the model. A model has no nodes, so its eager run is watched
(`timeline.py`), the program is run node by node, and the k-th call of an operation or module in the one is held against the
k-th in the other; where their numbers differ, a node is right if the model computed its value anywhere.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.analysis.comparison import tensors_in
from torchgraft.interpreter import Interpreter
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.recording.runs import Surroundings, backward, module_of
from torchgraft.recording.situations import Situation
from torchgraft.recording.timeline import Call, Fingerprint, Timeline, call_key, fingerprint, recorded_call

Prints = tuple[Fingerprint, ...]


@dataclass(frozen=True)
class FirstDifference:
    """Where a program leaves the model: the node (None if the program lacks a call), what is different, and the user's line."""

    node: str | None
    text: str
    line: str

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return f"node '{self.node}'{where}: {self.text}" if self.node else f"no node differs, but {self.text}{where}"


def first_difference(
    model: Callable[..., Any],
    program: torch.nn.Module,
    situation: Situation,
    surroundings: Surroundings,
    seed: int,
    different: dict[str, tuple[str, ...]],
) -> FirstDifference | None:
    """Find it by running both once more; `different` has the paths that differ, by what they are paths of."""
    timeline = _eager_timeline(model, program, situation, surroundings, seed)
    run = _ProgramRun(program)
    args, kwargs = situation.copied()
    surroundings.prepare(seed)
    try:
        value = run.run(*_positional(program, args, kwargs))
        backward(value, seed)
    except Exception as error:  # the node at which the program fails is what we look for
        if run.at is not None and run.at.op != "output":
            return _at_node(run.at, f"raises {type(error).__name__}: {_first_line(error)}")
    finally:
        surroundings.restore()
    search = _Search(run, timeline)
    return (
        search.differing_value()
        or search.differing_gradient(different.get("gradients", ()))
        or (search.missing_call("draws") if "random" in different else None)
        or (search.missing_call("writes") if "state" in different or "inputs" in different else None)
        or search.owner_of([*different.get("state", ()), *different.get("gradients", ())])
        or (search.returned() if "outputs" in different else None)
    )


def _eager_timeline(
    model: Callable[..., Any], program: torch.nn.Module, situation: Situation, surroundings: Surroundings, seed: int
) -> Timeline:
    root = module_of(model)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_module"}  # type: ignore[union-attr]
    for operators in (True, False):  # what runs below autograd is not always willing to be watched
        whole = {
            id(module)
            for holder in (root, program)
            if holder
            for path, module in holder.named_modules()
            if path in called
        }
        timeline = Timeline(whole)
        args, kwargs = situation.copied()
        surroundings.prepare(seed)
        timeline.add_values(tuple([fingerprint(tensor) for tensor in tensors_in((args, kwargs))]))
        try:
            with timeline.watching(root, operators):
                value = model(*args, **kwargs)
            backward(value, seed)
            break
        except Exception:  # the same run has just worked without being watched
            continue
        finally:
            surroundings.restore()
    return timeline


class _ProgramRun(Interpreter):
    """Notes what each node gives."""

    def __init__(self, program: torch.nn.Module) -> None:
        super().__init__(program)
        self.at: Node | None = None
        self.calls: dict[Node, Call] = {}
        self.prints: dict[Node, Prints] = {}

    def run_node(self, n: Node) -> Any:
        """Run one node and note its value."""
        self.at = n
        result = super().run_node(n)
        if n.op in ("call_function", "call_method", "call_module") and not self._is_part_of_container(n):
            first = [self.env[n.args[0]]] if n.args and isinstance(n.args[0], Node) and n.args[0] in self.env else []
            call = recorded_call(self._key(n), result, tuple(first))
            if call is not None:
                self.calls[n] = call
        self.prints[n] = self.calls[n].prints if n in self.calls else tuple(map(fingerprint, tensors_in(result)))
        return result

    def _is_part_of_container(self, node: Node) -> bool:
        # Taking an item out of a tuple is no call in eager.
        if getattr(node.target, "__name__", "") != "getitem" or not isinstance(node.args[0], Node):
            return False
        return not isinstance(self.env.get(node.args[0]), torch.Tensor)

    def _key(self, node: Node) -> str:
        if node.op == "call_module":
            return f"module {node.target}"
        if isinstance(node.target, torch._ops.OpOverload):
            return f"operator {node.target}"
        if node.target is getattr:
            return call_key(str(node.args[1]))
        return call_key(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))


def _positional(program: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments as Interpreter takes them, in the order of the inputs."""
    bound = inspect.signature(program.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())


class _Search:
    """Holds the values of a program's nodes against the calls of the model."""

    def __init__(self, run: _ProgramRun, timeline: Timeline) -> None:
        self._run = run
        self._timeline = timeline
        by_key: dict[str, list[Node]] = defaultdict(list)
        for node, call in run.calls.items():
            by_key[call.key].append(node)
        self._nodes_of = by_key
        # The call of the model that a node stands for, where both make as many calls of that kind.
        self._partner: dict[Node, Call] = {}
        for key, nodes in by_key.items():
            if len(nodes) == len(timeline.calls.get(key, ())):
                self._partner.update(zip(nodes, timeline.calls[key], strict=True))

    def differing_value(self) -> FirstDifference | None:
        """The first node with a value that is not the model's: first up to rounding, then to the last bit."""
        for exactly in (False, True):
            for node, call in self._run.calls.items():
                text = self._difference(node, call, exactly)
                if text is not None:
                    return self._stand_in(node, exactly) or self._described(node, text)
        return None

    def _difference(self, node: Node, call: Call, exactly: bool) -> str | None:
        partner = self._partner.get(node)
        if partner is not None:
            return _difference_of(partner.prints, call.prints, exactly)
        if any(
            _difference_of(other.prints, call.prints, exactly) is None
            for other in self._timeline.calls.get(call.key, ())
        ):
            return None
        if all(self._timeline.has_value(item, exactly) for item in call.prints):
            return None
        return "a value that the model never computes"

    def _stand_in(self, node: Node, exactly: bool) -> FirstDifference | None:
        """A call the model does not make, which hands its input on where the model makes another call."""
        missing = self._missing()
        for source in node.all_input_nodes if missing is not None else ():
            call = self._run.calls.get(source)
            if call is None or call.key in self._timeline.calls:
                continue
            given = [self._run.prints[item] for item in source.all_input_nodes if item in self._run.prints]
            if any(_difference_of(item, call.prints, exactly) is None for item in given):
                return _at_node(source, f"hands its input on, where the model calls {_said(missing)}")
        return None

    def differing_gradient(self, paths: tuple[str, ...]) -> FirstDifference | None:
        """From the end, the first node that passes another gradient on than the model does."""
        if not paths:
            return None
        for node in reversed(list(self._partner)):
            mine, theirs = self._run.calls[node].gradients, self._partner[node].gradients
            same = mine.keys() == theirs.keys() and all(theirs[at].same_values(mine[at], False) for at in mine)
            if not same:
                user = next(iter(node.users), node)
                return self._described(user, f"passes another gradient back to '{node.name}' than the model does")
        return None

    def missing_call(self, effect: str) -> FirstDifference | None:
        """A call with an effect that the model makes more often than the program."""
        call = self._missing(effect)
        return None if call is None else FirstDifference(None, f"the program lacks the call of {_said(call)}", "")

    def _missing(self, effect: str = "") -> Call | None:
        for call in self._timeline.order:
            if effect not in ("", call.effect):
                continue
            nodes = self._nodes_of.get(call.key, [])
            # Modules and operators are below or above the level of the program unless some node calls them.
            is_of_this_level = nodes or not call.key.startswith(("module ", "operator "))
            if is_of_this_level and len(nodes) < len(self._timeline.calls[call.key]):
                if all(_difference_of(call.prints, self._run.prints[node], False) for node in nodes):
                    return call
        return None

    def owner_of(self, paths: list[str]) -> FirstDifference | None:
        """The first node that refers to a parameter or buffer that differs, or to the module that holds it."""
        names = [path.removeprefix("gradient of ") for path in paths]
        for node in self._run.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                target = str(node.target)
                owned = next((name for name in names if name == target or name.startswith(f"{target}.")), None)
                if owned is not None:
                    return _at_node(node, f"every value is the model's, but '{owned}' is not")
        return None

    def returned(self) -> FirstDifference | None:
        """The output node: all values are right, and others are returned."""
        node = next((node for node in self._run.graph.nodes if node.op == "output"), None)
        return None if node is None else _at_node(node, "every value is the model's, but the program returns others")

    def _described(self, node: Node, text: str) -> FirstDifference:
        partner = self._partner.get(node)
        line = str(source_of(node) or "")
        if partner is not None and partner.line and partner.line != line:
            text += f" (there: {_said(partner)})"
        return FirstDifference(node.name, f"{_called(node)}: {text}", line)


def _difference_of(theirs: Prints, mine: Prints, exactly: bool) -> str | None:
    if len(theirs) != len(mine):
        return f"{len(theirs)} tensors in the model and {len(mine)} in the program"
    differences = [expected.difference(found, exactly) for expected, found in zip(theirs, mine, strict=True)]
    return next((text for text in differences if text is not None), None)


def _said(call: Call | None) -> str:
    if call is None:
        return ""
    name = call.name if call.name == call.key and " " in call.key else f"{call.name}()"
    return f"{name} at {call.line}" if call.line else name


def _called(node: Node) -> str:
    return f"{node.op} {node._pretty_print_target(node.target)}"


def _at_node(node: Node, text: str) -> FirstDifference:
    return FirstDifference(node.name, f"{_called(node)} {text}", str(source_of(node) or ""))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
