"""Copies an installed package into a folder with its imports of torch.fx changed to torchgraft, and nothing else.
What runs the copy is in `running.py`.

Only code is rewritten: docstrings and texts stay, and so do the parts of torch.fx that serve torch.compile and are no business of
a graph library (`KEPT`).
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

FX = {"torch.fx": "torchgraft"}
KEPT = ("torch.fx.experimental.proxy_tensor", "torch.fx.experimental.symbolic_shapes", "torch.fx.experimental.sym_node")

# A piece of a text: where it begins, where it ends, and what goes there.
Change = tuple[int, int, str]


def port_package(source: Path, target: Path, names: Mapping[str, str] = FX) -> int:
    """Copy the package at `source` to `target` with the `names` in its code changed; the number of files that changed."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    changed = 0
    for file in target.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        ported = port_text(text, names)
        if ported != text:
            file.write_text(ported, encoding="utf-8")
            changed += 1
    return changed


def port_text(text: str, names: Mapping[str, str] = FX) -> str:
    """The program `text` with the modules in `names` called by their new names."""
    if not any(name.rpartition(".")[2] in text for name in names):
        return text
    return Port(text, names).text()


class Port:
    """The changes to one file."""

    def __init__(self, text: str, names: Mapping[str, str]) -> None:
        self.names = names
        self.source = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def text(self) -> str:
        changes, missing = self._changes()
        if missing:
            place = self._first_statement()
            changes.append((place, place, "".join(f"import {name}\n" for name in sorted(missing))))
        result = self.source
        for begin, end, new in sorted(changes, reverse=True):
            result = result[:begin] + new.encode() + result[end:]
        return result.decode()

    def _changes(self) -> tuple[list[Change], set[str]]:
        """What to change, and the modules that code refers to by attributes: `torch.fx.Graph` needs no import of torch.fx."""
        changes: list[Change] = []
        missing: set[str] = set()
        for node in _nodes_to_change(self.tree):
            if isinstance(node, ast.Import):
                statement = self._import(node)
            elif isinstance(node, ast.ImportFrom):
                statement = self._import_from(node)
            elif isinstance(node, ast.Attribute) and (new := self._new_name(ast.unparse(node))):
                # The inner `torch.fx` of `torch.fx.Graph` is a node of its own and is the one that is replaced.
                if ast.unparse(node) in self.names:
                    changes.append((*self._span(node), new))
                    missing.add(new)
                continue
            else:
                continue
            if statement is not None:
                changes.append((*self._span(node), statement))
        return changes, missing

    def _new_name(self, name: str) -> str | None:
        if name.startswith(KEPT):
            return None
        for old, new in self.names.items():
            if name == old or name.startswith(old + "."):
                return new + name[len(old) :]
        return None

    def _import(self, statement: ast.Import) -> str | None:
        parts = []
        for alias in statement.names:
            new = self._new_name(alias.name)
            if new is None:
                parts.append(f"import {ast.unparse(alias)}")
            elif alias.asname:
                parts.append(f"import {new} as {alias.asname}")
            else:
                # `import torch.fx` also binds `torch`.
                parts.append(f"import {alias.name.partition('.')[0]}, {new}")
        changed = any(self._new_name(alias.name) for alias in statement.names)
        return "; ".join(parts) if changed else None

    def _import_from(self, statement: ast.ImportFrom) -> str | None:
        if statement.level or statement.module is None:
            return None
        parts, kept = [], []
        for alias in statement.names:
            whole = self._new_name(f"{statement.module}.{alias.name}")
            module = self._new_name(statement.module)
            if module is not None and whole is not None:
                parts.append(f"from {module} import {ast.unparse(alias)}")
            elif whole is not None:
                parts.append(f"import {whole} as {alias.asname or alias.name}")
            else:
                kept.append(ast.unparse(alias))
        if not parts:
            return None
        if kept:
            parts.append(f"from {statement.module} import {', '.join(kept)}")
        return "; ".join(parts)

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _first_statement(self) -> int:
        """Where an import may stand: behind the docstring and the imports from `__future__`."""
        place = 0
        for statement in self.tree.body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
                break
            assert statement.end_lineno is not None
            place = self.starts[min(statement.end_lineno, len(self.starts) - 1)]
        return place


def _nodes_to_change(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those inside f-strings, whose places Python 3.11 does not know, and in names that are kept."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(KEPT):
            continue
        yield node
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        waiting.extend(child for child in children if not isinstance(child, ast.JoinedStr))
