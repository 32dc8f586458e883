"""Put other modules in the place of those that a program calls, chosen by class or by path.
Edits of functions and patterns are the business of `rewriting/`.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import PassError
from torchgraft.ir.copying import import_object
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.attributes import References
from torchgraft.passes.definition import Pass

_MARK = "_replaced_by"


@dataclass(frozen=True)
class ReplaceModule(Pass):
    """Replace every called module that `old` names by what `new` makes.

    `old` is a class, its import path (`torch.nn.ReLU`), or a pattern of module paths (`layer1.*.relu`). `new` is a module
    class or a function, or its import path; a function with a parameter gets the old module. One module called from
    several places is replaced by one. The model that the program was captured from keeps its modules.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> ReplaceModule("torch.nn.ReLU", "torch.nn.Tanh")(program).changes, program.get_submodule("1")
    (1, Tanh())
    """

    old: Any = ""
    new: Any = ""

    def run(self, module: GraphModule) -> int:
        """Replace, and return how many modules went."""
        matches = self._matcher()
        make = _maker(self.new)
        references = References(module)
        placed: dict[str, str] = {}
        made: dict[int, tuple[nn.Module, nn.Module]] = {}
        for node in list(module.graph.nodes):
            if node.op != "call_module":
                continue
            found: Any = find_attribute(module, node.target)[0]
            if found.__dict__.get(_MARK) == str(self):
                continue  # made by this pass, which is done with it
            if id(found) not in made:
                if not matches(found, node.target):
                    continue
                made[id(found)] = found, self._replacement(make, found, node.target)
            replacement = made[id(found)][1]
            if replacement is not found:
                _install(references, placed, node, replacement)
        return sum(old is not new for old, new in made.values())

    def _matcher(self) -> Callable[[nn.Module, str], bool]:
        if isinstance(self.old, type):
            return lambda module, path: isinstance(module, self.old)
        if not isinstance(self.old, str) or not self.old:
            raise PassError(f"replace-module needs a class or a pattern of paths to look for, not old={self.old!r}")
        cls = _imported(self.old)
        if isinstance(cls, type):
            return lambda module, path: isinstance(module, cls)
        return lambda module, path: fnmatch.fnmatchcase(path, self.old)

    def _replacement(self, make: Callable[[nn.Module], Any], found: nn.Module, path: str) -> nn.Module:
        result = make(found)
        if not isinstance(result, nn.Module):
            raise PassError(
                f"replace-module: new made {result!r} for '{path}', which is no module; return an nn.Module"
            )
        if result is not found:
            result.train(found.training)
            result.__dict__[_MARK] = str(self)
        return result


def _install(references: References, placed: dict[str, str], node: Any, replacement: nn.Module) -> None:
    """Put a module in the place of the one that a node calls; `placed` has the paths of those that went elsewhere."""
    old_path = node.target
    if find_attribute(references.module, old_path)[0] is replacement:
        return
    if old_path not in placed:
        placed[old_path] = references.put_for_all(old_path, replacement)
    path = placed[old_path]
    if path != old_path:
        references.change(old_path, -1)
        references.change(path, 1)
        node.target = path
        references.drop_unused(old_path)


def _maker(new: Any) -> Callable[[nn.Module], Any]:
    function = _imported(new) if isinstance(new, str) else new
    if not callable(function) or isinstance(function, nn.Module):
        raise PassError(
            f"replace-module needs a module class or a function that makes one, not new={new!r}; "
            "give it, or its import path such as torch.nn.GELU"
        )
    if isinstance(function, type):
        return lambda module: function()
    takes_old = bool(inspect.signature(function).parameters)
    return (lambda module: function(module)) if takes_old else (lambda module: function())


def _imported(path: str) -> Any:
    """What an import path names (`package.module:name`, or with a point), or None."""
    if "." not in path and ":" not in path:
        return None
    try:
        return import_object(path.replace(":", "."))
    except (ImportError, AttributeError, ValueError):
        return None
