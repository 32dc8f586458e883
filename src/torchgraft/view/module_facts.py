"""What is measured of every module of a model: calls, inputs, outputs, parameters and FLOPs, from a run on tensors without data.
How it is shown is in `module_summary.py`; what an operator costs is known in `analysis/cost`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torchgraft.analysis.cost import Cost, cost
from torchgraft.analysis.cost.count import parameters_of
from torchgraft.analysis.dry_run import computing_if_needed, program_of
from torchgraft.analysis.fake import copied_module, fake_inputs, fake_mode_of, fake_module, without_log
from torchgraft.codegen.calling import copied_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.ir.modules import paths_around
from torchgraft.ir.node import Node
from torchgraft.results.progress import stage
from torchgraft.results.tables import count
from torchgraft.view.node_facts import Facts, facts_of, facts_text, known_facts, module_stack_of


@dataclass
class ModuleFacts:
    """What is known of one module; what is not known (it was never called, or never run) is None."""

    path: str
    name: str
    type: str
    depth: int
    parameters: int
    trainable: int
    bytes: int
    shared: bool = False
    calls: int | None = None
    input: Facts = None
    output: Facts = None
    flops: int | None = None


@dataclass
class ModelFacts:
    """The modules of a model, itself first, each followed by those inside it."""

    modules: list[ModuleFacts]
    inputs: str = ""
    unknown: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)

    @property
    def by_path(self) -> dict[str, ModuleFacts]:
        """The rows by their paths."""
        return {row.path: row for row in self.modules}

    def describe_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Say what the model was run on."""
        self.inputs = ", ".join([facts_text(facts_of(value)) for value in (*args, *kwargs.values())])

    def add_costs(self, found: Cost) -> None:
        """Put the FLOPs of a program into the rows of its modules; one that is never called has those of its children."""
        for row in reversed(self.modules):
            entry = found.modules.get(row.path)
            row.flops = entry.forward.flops if entry is not None else self._inside(row)
        self.unknown = tuple(found.unknown)

    def _inside(self, row: ModuleFacts) -> int | None:
        prefix, depth = f"{row.path}.", row.depth + 1
        children = [other for other in self.modules if other.depth == depth and other.path.startswith(prefix)]
        known = [child.flops for child in children if child.flops is not None]
        return sum(known) if known else None

    def notes(self) -> list[str]:
        """The sums, and what is not in them, as sentences."""
        whole = self.modules[0]
        frozen = whole.parameters - whole.trainable
        text = f"{count(whole.parameters, 'parameter')} ({whole.trainable:,} trainable, {frozen:,} not)"
        text += f", {count(whole.bytes, 'byte')}"
        if whole.flops is not None:
            text += f"; {whole.flops:,} FLOPs forward for {self.inputs or 'no inputs'} (a multiply-add is two)"
        result = [text]
        if self.unknown:
            result.append(f"no FLOPs are counted for {', '.join(self.unknown)}: no formula is known")
        return result + self.problems


def model_facts(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flops: bool) -> ModelFacts:
    """Everything there is to say; runs the model only if there are inputs."""
    if not isinstance(model, torch.nn.Module):
        raise GraftError(f"cannot summarise a {type(model).__name__}: give an nn.Module or a program of torchgraft")
    rows = _program_rows(model) if isinstance(model, GraphModule) else _module_rows(model)
    facts = ModelFacts(rows)
    facts.describe_inputs(args, kwargs)
    if args or kwargs:
        with stage("running without computing", 1, 2 if flops else 1):
            if isinstance(model, GraphModule):
                _observe_program(model, args, kwargs, facts.by_path)
            else:
                _observe_model(model, args, kwargs, facts)
        if flops:
            with stage("counting FLOPs", 2, 2):
                _add_flops(model, args, kwargs, facts)
    return facts


# ---- the tree ----


def _module_rows(model: torch.nn.Module) -> list[ModuleFacts]:
    seen: set[int] = set()
    rows = []
    for path, module in model.named_modules(remove_duplicate=False):
        name, depth = path.rpartition(".")[2], path.count(".") + 1 if path else 0
        rows.append(_row(path, name, type(module).__name__, depth, module.parameters(), id(module) in seen))
        seen.add(id(module))
    return rows


def _program_rows(program: GraphModule) -> list[ModuleFacts]:
    """The modules that the nodes of a program belong to, in the order in which they first appear inside each other."""
    types: dict[str, str] = {"": type(program).__name__}
    tensors: dict[str, dict[int, torch.nn.Parameter]] = {"": {id(p): p for p in program.parameters()}}
    for node in program.graph.nodes:
        for path, kind in _stack(node, program):
            types[path] = types.get(path) or kind
            tensors.setdefault(path, {}).update({id(item): item for item in parameters_of(node, program)})
    rows = []
    for path in _tree_order(types):
        parts = path.split(".") if path else []
        tensors_inside = tensors.get(path, {}).values()
        rows.append(_row(path, "".join(parts[-1:]), types.get(path, ""), len(parts), tensors_inside, False))
    return rows


def _tree_order(paths: Iterable[str]) -> list[str]:
    """Parents before children, siblings as they came; a parent that no node names is put in."""
    first: dict[str, int] = {}
    for path in paths:
        for around in reversed(paths_around(path)):
            first.setdefault(around, len(first))
    return sorted(first, key=lambda path: [first[around] for around in reversed(paths_around(path))])


def _stack(node: Node, program: GraphModule) -> list[tuple[str, str]]:
    stack = [(path, kind) for path, kind in module_stack_of(node) if path]
    if node.op == "call_module" and node.target not in dict(stack):
        stack.append((node.target, type(program.get_submodule(node.target)).__name__))
    if node.op == "get_attr" and not stack and "." in node.target:
        # Operator programs fetch parameters in front, outside of any module.
        stack = [(path, "") for path in reversed(paths_around(node.target)[1:])]
    return stack


def _row(
    path: str, name: str, kind: str, depth: int, parameters: Iterable[torch.nn.Parameter], shared: bool
) -> ModuleFacts:
    unique = list({id(item): item for item in parameters}.values())
    sizes = [0 if isinstance(item, torch.nn.parameter.UninitializedParameter) else item.numel() for item in unique]
    trainable = sum(size for size, item in zip(sizes, unique, strict=True) if item.requires_grad)
    octets = sum(size * item.element_size() for size, item in zip(sizes, unique, strict=True) if size)
    return ModuleFacts(path, name, kind, depth, sum(sizes), trainable, octets, shared)


# ---- one run ----


def _observe_model(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], facts: ModelFacts) -> None:
    """Run a copy of the model, so that whatever it remembers stays away from the original."""
    mode = fake_mode_of(args, kwargs, model)
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            fakes = fake_inputs(args, model, mode), fake_inputs(kwargs, model, mode)
            copied = fake_module(model, mode)
            with mode, without_log(), noted_modules(copied, facts):
                copied(*fakes[0], **fakes[1])
        except Exception:  # a model may fail on fakes in any way; if it is at fault itself, it fails again here
            copied = copied_module(model)
            values, keywords = copied_inputs(args, kwargs)
            with noted_modules(copied, facts):
                copied(*values, **keywords)


@contextlib.contextmanager
def noted_modules(model: torch.nn.Module, facts: ModelFacts) -> Iterator[None]:
    """Note what goes in and out of every module of a model, or of a copy of it, while the block runs it."""
    rows = facts.by_path
    paths: dict[torch.nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
        rows[path].calls, rows[path].input, rows[path].output = 0, None, None

    def note(module: torch.nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        given = (*inputs, *keywords.values())
        for path in paths[module]:
            row = rows[path]
            row.calls = (row.calls or 0) + 1
            row.input, row.output = facts_of(given[0] if len(given) == 1 else given), facts_of(output)

    watched = [module for module in paths if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_forward_hook(note, with_kwargs=True) for module in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observe_program(program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], rows: dict[str, Any]) -> None:
    facts = known_facts(program.graph, args, kwargs)
    for node in program.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        for path, _ in _stack(node, program):
            if facts[node] is not None:  # a guard has no value
                rows[path].output = facts[node]  # the last node of a module gives its result
            if node.op == "call_module" and path == node.target:
                rows[path].calls = (rows[path].calls or 0) + 1
    rows[""].output = facts[program.graph.output_node()]
    rows[""].calls = 1
    inputs = tuple([facts[node] for node in program.graph.nodes if node.op == "placeholder"])
    rows[""].input = inputs[0] if len(inputs) == 1 else inputs


# ---- FLOPs ----


def _add_flops(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], facts: ModelFacts) -> None:
    """Count on the program without modules of torch.nn, because these have rows as well."""
    try:
        program = program_of(model, args, kwargs, level="function")
        facts.add_costs(forward_cost(program, args, kwargs))
    except Exception as error:  # capturing runs the model again, and fails on some that run
        facts.problems.append(f"FLOPs are not known: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def forward_cost(program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cost:
    """What the modules of a program cost in a run, on tensors without data where that is possible, else on copies."""
    return computing_if_needed(
        lambda compute: cost(program, args, kwargs, backward=False, compute=compute), after_any_error=True
    )
