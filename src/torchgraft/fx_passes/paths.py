"""The import paths of torch.fx's passes, and where each leads: `from torchgraft.passes.infra.partitioner import …` works as it
does for `torch.fx.passes.infra.partitioner`. No pass lives here, and nothing here needs torch.

A finder at the end of `sys.meta_path` answers for the paths in the table and for nothing else, so `import a.b.c` and
`from a.b.c import d` work without a copy of torch.fx's folders, and a real file of the same name would win. The module found
is the home itself and no copy: a class has one identity and one `__module__`, so it pickles. Type checkers do not run finders;
for them the homes in the table are ordinary modules to import from.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HOMES = {
    "_compatibility": "fx_passes.semi_private",
    "_lazy_graph_module": "fx_passes.semi_private",
    "_pytree": "fx_passes.semi_private",
    "annotate": "fx_passes.small_passes",
    "config": "fx_passes.semi_private",
    "experimental.const_fold": "fx_passes.const_fold",
    "experimental.debug": "fx_passes.small_passes",
    "experimental.normalize": "fx_passes.normalize",
    "experimental.optimization": "fx_passes.optimization",
    "experimental.graph_gradual_typechecker": "fx_passes.typechecker",
    "experimental.merge_matmul": "fx_passes.merge_matmul",
    "experimental.meta_tracer": "fx_passes.meta_tracer",
    "experimental.rewriter": "fx_passes.rewriter",
    "experimental.schema_type_annotation": "fx_passes.small_passes",
    "passes.annotate_getitem_nodes": "fx_passes.small_passes",
    "passes.dialect.common.cse_pass": "fx_passes.cse",
    "passes.graph_drawer": "fx_passes.drawer",
    "passes.graph_manipulation": "fx_passes.small_passes",
    "passes.graph_transform_observer": "fx_passes.observer",
    "passes.infra.partitioner": "splitting.partitioner",
    "passes.infra.pass_base": "fx_passes.pass_manager",
    "passes.infra.pass_manager": "fx_passes.pass_manager",
    "passes.net_min_base": "fx_passes.minimizer",
    "passes.param_fetch": "fx_passes.small_passes",
    "passes.operator_support": "splitting.operator_support",
    "passes.pass_manager": "fx_passes.plain_pass_manager",
    "passes.split_module": "splitting.split_module",
    "passes.split_utils": "fx_passes.split_utils",
    "passes.splitter_base": "fx_passes.splitter",
    "passes.tools_common": "fx_passes.tools",
    "passes.utils.common": "fx_passes.matching",
    "passes.utils.fuser_utils": "splitting.fusing",
    "passes.utils.matcher_utils": "fx_passes.matching",
    "passes.utils.matcher_with_name_node_map_utils": "fx_passes.matching",
    "passes.utils.source_matcher_utils": "fx_passes.source_partitions",
}

# The modules of torch.fx that are files of torchgraft, reached as attributes after `import torch.fx as fx`.
MODULES = frozenset(
    (
        *("_compatibility", "_lazy_graph_module", "_pytree", "_symbolic_trace", "config", "experimental", "graph"),
        *("graph_module", "immutable_collections", "interpreter", "node", "operator_schemas", "passes", "proxy"),
        *("subgraph_rewriter", "tensor_type", "traceback"),
    )
)

_PACKAGE = __name__.partition(".")[0]
_ALIASES = {f"{_PACKAGE}.{path}": f"{_PACKAGE}.{home}" for path, home in HOMES.items()}
# The folders on the way that are no real ones.
_FOLDERS = {
    f"{_PACKAGE}.{folder}"
    for folder in ("experimental", "passes.dialect", "passes.dialect.common", "passes.infra", "passes.utils")
}
# Folders from which names may be imported that live in one of their files.
_NAMES_OF = {f"{_PACKAGE}.passes.utils": f"{_PACKAGE}.fx_passes.matching"}


class _Alias(Loader):
    def __init__(self, home: str) -> None:
        self._home = home

    def exec_module(self, module: ModuleType) -> None:
        # What is in sys.modules afterwards is what the import gives.
        sys.modules[module.__name__] = importlib.import_module(self._home)


class _Folder(Loader):
    def __init__(self, home: str | None) -> None:
        self._home = home

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "A folder of torch.fx's; what is in it is listed in torchgraft.fx_passes.paths."

        def attribute(name: str) -> Any:
            path = f"{module.__name__}.{name}"
            if path in _ALIASES or path in _FOLDERS:
                return importlib.import_module(path)
            home = None if self._home is None or name[0] == "_" else importlib.import_module(self._home)
            if home is None or name not in home.__all__:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(home, name)

        module.__getattr__ = attribute  # type: ignore[method-assign]


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _ALIASES:
            return ModuleSpec(fullname, _Alias(_ALIASES[fullname]))
        if fullname in _FOLDERS:
            return ModuleSpec(fullname, _Folder(_NAMES_OF.get(fullname)), is_package=True)
        return None


def install() -> None:
    """Let the paths in the table be found; done once, when torchgraft is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
