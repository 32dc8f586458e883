"""What every room asks about torch's modules: what is one, where they are, what their tensors are called, who has hooks.
Nothing here knows about graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_everywhere = torch.nn.modules.module
_HOMES = ("torch.nn.", "torch.ao.nn.")


def no_model(value: Any) -> str | None:
    """What is wrong with something that was given as a model: it cannot be called, or is a class that a model is made of.

    >>> no_model(torch.nn.ReLU)
    'the class ReLU; give a model that is made of it: ReLU(...)'
    >>> no_model(torch.nn.ReLU()) is None
    True
    """
    if not callable(value):
        return f"a {type(value).__name__}; give a torch.nn.Module or a function"
    if isinstance(value, type) and issubclass(value, torch.nn.Module):
        return f"the class {value.__name__}; give a model that is made of it: {value.__name__}(...)"
    return None


def is_from_torch(module_or_class: Any) -> bool:
    """Whether a module, or a class of modules, is one of torch's own layers or containers, and no subclass of a user's.

    >>> is_from_torch(torch.nn.Linear(2, 2)), is_from_torch(type("Mine", (torch.nn.Linear,), {}))
    (True, False)
    """
    cls = module_or_class if isinstance(module_or_class, type) else type(module_or_class)
    return cls.__module__.startswith(_HOMES) and not cls.__module__.startswith("torch.nn.parallel.")


def paths_of_modules(root: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Every module of a model with its first path, as `named_modules` gives them, in a fifth of the time.

    >>> list(paths_of_modules(torch.nn.Sequential(torch.nn.ReLU())).values())
    ['', '0']
    """
    paths = {root: ""}
    # Modules whose children are being looked at; no recursion, because a chain may be longer than Python's stack.
    pending = [("", iter(root._modules.items()))]
    while pending:
        prefix, children = pending[-1]
        for name, child in children:
            if child is None or child in paths:  # used twice, or a circle
                continue
            paths[child] = path = prefix + name
            if child._modules:
                pending.append((path + ".", iter(child._modules.items())))
                break
        else:
            pending.pop()
    return paths


def paths_around(path: str) -> list[str]:
    """A path, and those of the modules around it, from the inside out.

    >>> paths_around("encoder.0.linear")
    ['encoder.0.linear', 'encoder.0', 'encoder']
    """
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def inner_modules(modules: Iterable[torch.nn.Module]) -> set[torch.nn.Module]:
    """Some modules and those inside them.

    >>> len(inner_modules([torch.nn.Sequential(torch.nn.ReLU())]))
    2
    """
    return {inner for module in modules for inner in (module.modules() if module._modules else (module,))}


def names_of_tensors(paths: dict[torch.nn.Module, str]) -> dict[int, str]:
    """The path of every parameter and buffer, by identity; the first one where it has several."""
    names: dict[int, str] = {}
    for module, path in paths.items():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None:
                    names.setdefault(id(value), f"{path}.{name}" if path else name)
    return names


def has_hooks(module: Any) -> bool:
    """Whether calling a module does more than running its forward."""
    found = module.__dict__.get  # a compiled module has none of them
    return bool(
        found("_forward_hooks")
        or found("_forward_pre_hooks")
        or found("_backward_hooks")
        or found("_backward_pre_hooks")
    )


def hooks_for_all() -> bool:
    """Whether there are hooks that run whenever any module is called."""
    return bool(
        _everywhere._global_forward_hooks
        or _everywhere._global_forward_pre_hooks
        or _everywhere._global_backward_hooks
        or _everywhere._global_backward_pre_hooks
    )
