"""The rule that torch and Python are patched in one counted way only, that of `capturing/patching/active.py`.
A plain assignment to a module or class of somebody else's outlives an error, and two threads put back each other's patch.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import torchgraft

SOURCE = Path(torchgraft.__file__).parent
# Where setattr is called on something that is our own: a program, a node, a class of ours, a module that is being built.
OWN = {
    "analysis/effects/declared.py": {"function_or_class"},  # a mark on the function that it was given
    "backends/cudagraphs.py": {"place"},  # switches of torch's, while a graph is recorded
    "backends/variants.py": {"self.copy"},  # a program that follows its model
    "backends/watch.py": {"self"},
    "capturing/state/leftovers.py": {"program"},
    "capturing/patching/module_patches.py": {"TrainingFlag"},
    "capturing/symbolic/proxy.py": {"Proxy"},
    "capturing/flowing/sizes.py": {"SymbolicNumber", "cls", "_class"},
    "capturing/symbolic/inputs.py": {"node"},
    "capturing/symbolic/tracer.py": {"cls"},  # a subclass of Tracer that is being made
    "cli/demo.py": {"parent"},
    "cli/small_configurations.py": {"owner"},  # a configuration that is being made
    "codegen/attributes.py": {"holder"},
    "codegen/graph_module.py": {"holder"},
    "distributed/pipeline.py": {"stage"},  # a module that is being made
    "fx_passes/attributes.py": {"holder"},
    "fx_passes/const_fold.py": {"self", "main"},
    "fx_passes/optimization.py": {"modules[parent]"},
    "fx_passes/pass_manager.py": {"self"},
    "lowering/tensors.py": {"TracedTensor"},
    "passes/attributes.py": {"holder"},
    "fx_passes/split_utils.py": {"getattr_recursive(obj, path) if path else obj"},
}
# The one way.
COUNTED = "capturing/patching/active.py"


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def foreign_names(tree: ast.Module) -> set[str]:
    """The names under which a file knows modules and classes of torch and of the standard library."""
    names = set()
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in item.names}
        elif isinstance(item, ast.ImportFrom) and not (item.module or "").startswith("torchgraft"):
            names |= {alias.asname or alias.name for alias in item.names}
    return {name for name in names if name != "torchgraft"}


def root_name(expression: ast.expr) -> str:
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return expression.id if isinstance(expression, ast.Name) else ""


def assignments(tree: ast.Module) -> Iterator[ast.Attribute]:
    """The attributes that are assigned to or deleted."""
    for item in ast.walk(tree):
        targets = item.targets if isinstance(item, ast.Assign | ast.Delete) else []
        targets = [item.target] if isinstance(item, ast.AugAssign | ast.AnnAssign) else targets
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute):
                    yield part


def test_nobody_patches_by_plain_assignment() -> None:
    found = []
    for path, tree in trees():
        foreign = foreign_names(tree)
        found += [(path, ast.unparse(target)) for target in assignments(tree) if root_name(target.value) in foreign]
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("setattr", "delattr"):
                holder = ast.unparse(call.args[0])
                found += [(path, holder)] if holder not in OWN.get(path, ()) and path != COUNTED else []
    assert found == [], "patch with a Patch of capturing/patching/active.py, or add what is your own to the table"


def test_the_rule_sees_what_it_forbids() -> None:
    tree = ast.parse(
        "import torch\nfrom torch import nn\ntorch.relu = 1\nnn.Module.forward, x = 1, 2\ndel torch.fx.node\nx.y = 1"
    )
    found = [ast.unparse(target) for target in assignments(tree) if root_name(target.value) in foreign_names(tree)]
    assert found == ["torch.relu", "nn.Module.forward", "torch.fx.node"]
