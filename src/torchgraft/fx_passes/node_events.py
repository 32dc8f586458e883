"""torch.fx's record of why a splitter put each node where it is: `splitter_base.NodeEvent` and `NodeEventTracker`.
The splitter that keeps it is in `splitter.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchgraft.ir.node import Node
from torchgraft.results.files import write_text

Writer = Callable[[str], object]


@dataclass(eq=False)
class NodeEvent:
    """Something that happened to a node, in the form `kind|reason`, and the node that caused it."""

    source: Node
    desc: str
    dep: Node | None = None

    def to_str(self) -> str:
        """The event as a line; `#` where the node itself is the cause."""
        return f"{self.source.name}: {self.desc} {self.dep.name if self.dep is not None else '#'}"


class NodeEventTracker:
    """Events in their order, by node. `dump()` writes files that begin with `dump_prefix`: none in mode 0, all events in
    mode 1, in mode 3 also the history of every node that has more than one.

    >>> import torchgraft
    >>> x, relu, output = torchgraft.symbolic_trace(lambda x: x.relu()).graph.nodes
    >>> tracker = NodeEventTracker(0, "events")
    >>> tracker.add(relu, "acc_del|user_of_new_cpu_node", x)
    >>> tracker.to_dict()
    {'relu': ['relu: acc_del|user_of_new_cpu_node x']}
    """

    def __init__(self, tracker_mode: int, dump_prefix: str) -> None:
        self.tracker_mode = tracker_mode
        self.dump_prefix = dump_prefix
        self.events: list[NodeEvent] = []
        self.node_events: dict[str, list[int]] = {}
        self.writer: Writer = print

    def add(self, node: Node, desc: str, dep: Node | None = None) -> None:
        """Note an event."""
        self.node_events.setdefault(node.name, []).append(len(self.events))
        self.events.append(NodeEvent(node, desc, dep))

    def print_node(self, node_name: str, recursive: bool = False, tab: str = "", writer: Writer | None = None) -> None:
        """Print the events of a node; with `recursive`, below each those of the node that caused it."""
        write = writer or self.writer
        for index in self.node_events.get(node_name, []):
            event = self.events[index]
            write(tab + event.to_str())
            if recursive and event.dep is not None:
                self.print_node(event.dep.name, True, f"| {tab}", write)

    def to_dict(self) -> dict[str, list[str]]:
        """The lines of every node."""
        return {name: [self.events[index].to_str() for index in found] for name, found in self.node_events.items()}

    def print_all(self, writer: Writer | None = None) -> None:
        """Print the events of every node."""
        write = writer or self.writer
        for name in self.node_events:
            write(f"Node: {name}:")
            self.print_node(name, tab="  ", writer=write)

    def dump(self) -> None:
        """Write the files that the mode asks for."""
        if self.tracker_mode >= 1:
            lines: list[str] = []
            self.print_all(lines.append)
            write_text(Path(f"{self.dump_prefix}_all.txt"), "".join(f"{line}\n" for line in lines))
        if self.tracker_mode == 3:
            lines = []
            for name in [name for name, found in self.node_events.items() if len(found) > 1]:
                lines.append(f"===== Tracking node {name} =====")
                self.print_node(name, True, "|-", lines.append)
                lines.append(f"===== End of tracking node {name} =====")
            write_text(Path(f"{self.dump_prefix}_nodes.txt"), "".join(f"{line}\n" for line in lines))
