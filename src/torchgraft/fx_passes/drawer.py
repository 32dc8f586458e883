"""torch.fx's FxGraphDrawer over our own drawing: no Graphviz and no pydot are needed."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.view.drawing import draw
from torchgraft.view.graph_files import to_dot


class DotGraph:
    """What `get_dot_graph` returns, with the methods of pydot that code uses: `write_svg`, `write_raw`, `to_string` and so on."""

    def __init__(self, module: GraphModule, name: str) -> None:
        self._module, self._name = module, name

    def to_string(self) -> str:
        """The program in the DOT language."""
        return to_dot(self._module)

    def create_svg(self) -> bytes:
        """The drawing as SVG."""
        return draw(self._module, title=self._name).svg.encode()

    def create_png(self) -> bytes:
        """The drawing as PNG; needs the package cairosvg."""
        return draw(self._module, title=self._name).to_png()

    def write(self, path: str | PathLike[str], prog: Any = None, format: str = "raw") -> bool:
        """Write the drawing in a format: raw or dot, svg, png, pdf."""
        if format in ("raw", "dot"):
            Path(path).write_text(self.to_string())
        elif format == "svg":
            Path(path).write_bytes(self.create_svg())
        elif format == "png":
            Path(path).write_bytes(self.create_png())
        else:
            raise GraftError(f"cannot write a drawing as {format!r}: use raw, dot, svg or png")
        return True

    def write_raw(self, path: str | PathLike[str], prog: Any = None) -> bool:
        """Write the program in the DOT language."""
        return self.write(path)

    write_dot = write_raw

    def write_svg(self, path: str | PathLike[str], prog: Any = None) -> bool:
        """Write the drawing as SVG."""
        return self.write(path, format="svg")

    def write_png(self, path: str | PathLike[str], prog: Any = None) -> bool:
        """Write the drawing as PNG; needs the package cairosvg."""
        return self.write(path, format="png")


class FxGraphDrawer:
    """Draws a program and the programs that it calls.

    The options that choose labels are taken and not needed: our drawing shows parameters, shapes and lines by itself.

    >>> import torch, torchgraft
    >>> drawer = FxGraphDrawer(torchgraft.symbolic_trace(lambda x: torch.relu(x)), "small")
    >>> drawer.get_dot_graph().create_svg()[:4]
    b'<svg'
    """

    def __init__(
        self,
        graph_module: GraphModule,
        name: str,
        ignore_getattr: bool = False,
        ignore_parameters_and_buffers: bool = False,
        skip_node_names_in_args: bool = True,
        parse_stack_trace: bool = False,
        dot_graph_shape: str | None = None,
        normalize_args: bool = False,
    ) -> None:
        self._name = name
        self._dot_graphs = {name: DotGraph(graph_module, name)}
        for node in graph_module.graph.nodes:
            module = graph_module.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(module, GraphModule):
                self._dot_graphs[f"{name}_{node.target}"] = DotGraph(module, f"{name}_{node.target}")

    def get_dot_graph(self, submod_name: str | None = None) -> DotGraph:
        """The drawing of the program, or of one that it calls."""
        return self.get_main_dot_graph() if submod_name is None else self.get_submod_dot_graph(submod_name)

    def get_main_dot_graph(self) -> DotGraph:
        """The drawing of the program."""
        return self._dot_graphs[self._name]

    def get_submod_dot_graph(self, submod_name: str) -> DotGraph:
        """The drawing of a program that it calls."""
        return self._dot_graphs[f"{self._name}_{submod_name}"]

    def get_all_dot_graphs(self) -> dict[str, DotGraph]:
        """All drawings, by name."""
        return self._dot_graphs
