"""Two programs side by side: which node of the one is which node of the other, by what they do and where they stand.
What differs between two nodes that belong together is said in `program_diff.py`. Nothing is run here; two programs that
were run are lined up by their values, which says more, in `recording/alignment.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.ir.printing import target_text
from torchgraft.view.node_facts import module_path_of

Pair = tuple[Node | None, Node | None]
# Above this many comparisons difflib's quick way, which ignores very common tokens, has to do.
_THOROUGH = 4_000_000


def align(before: Graph, after: Graph) -> list[Pair]:
    """Every node of both graphs, in order, beside its counterpart or beside None.

    Nodes belong together if they call the same thing in the same module and stand in the same order; names do not matter, since
    one inserted `relu` renames all that follow. Of what is left between them, those with the same name or the same inputs
    are taken to be replacements.
    """
    old, new = list(before.nodes), list(after.nodes)
    matches = matching([_token(node) for node in old], [_token(node) for node in new])
    counterpart = {old[i]: new[j] for i, j in matches}
    result: list[Pair] = []
    i = j = 0
    for next_i, next_j in [*matches, (len(old), len(new))]:
        result += _between(old[i:next_i], new[j:next_j], counterpart)
        if next_i < len(old):
            result.append((old[next_i], new[next_j]))
        i, j = next_i + 1, next_j + 1
    return result


def _token(node: Node) -> Hashable:
    return node.op, target_text(node.target), module_path_of(node)


def _between(removed: list[Node], added: list[Node], counterpart: dict[Node, Node]) -> list[Pair]:
    """The nodes between two pairs: replacements side by side, the others each on their own."""
    result: list[Pair] = []
    start = 0
    for node in removed:
        inputs = [counterpart.get(source) for source in node.all_input_nodes]
        for index in range(start, len(added)):
            candidate = added[index]
            same_inputs = bool(inputs) and inputs == list(candidate.all_input_nodes)
            if candidate.name == node.name or (same_inputs and _is_call(node) and _is_call(candidate)):
                result += [(None, other) for other in added[start:index]]
                result.append((node, candidate))
                counterpart[node] = candidate
                start = index + 1
                break
        else:
            result.append((node, None))
    return result + [(None, other) for other in added[start:]]


def _is_call(node: Node) -> bool:
    return node.op.startswith("call_")


def matching(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Positions of equal items in two sequences, rising in both.

    Items that occur once in each are matched first, then what lies between them; so it stays quick on long programs.

    >>> matching("abcxd", "abyxd")
    [(0, 0), (1, 1), (3, 3), (4, 4)]
    """
    found: list[tuple[int, int]] = []
    pending = [(0, len(old), 0, len(new))]
    while pending:
        i, end_i, j, end_j = pending.pop()
        while i < end_i and j < end_j and old[i] == new[j]:
            found.append((i, j))
            i, j = i + 1, j + 1
        while i < end_i and j < end_j and old[end_i - 1] == new[end_j - 1]:
            end_i, end_j = end_i - 1, end_j - 1
            found.append((end_i, end_j))
        if i == end_i or j == end_j:
            continue
        anchors = _anchors(old[i:end_i], new[j:end_j])
        if not anchors:
            found += [(i + a, j + b) for a, b in _compared(old[i:end_i], new[j:end_j])]
            continue
        for a, b in anchors:
            found.append((i + a, j + b))
        edges = [(-1, -1), *anchors, (end_i - i, end_j - j)]
        for (a, b), (next_a, next_b) in pairwise(edges):
            pending.append((i + a + 1, i + next_a, j + b + 1, j + next_b))
    return sorted(found)


def _anchors(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Items that occur exactly once in both, as many as stand in the same order."""
    counts_old, counts_new = Counter(old), Counter(new)
    places = {item: index for index, item in enumerate(new) if counts_new[item] == 1}
    pairs = [(index, places[item]) for index, item in enumerate(old) if counts_old[item] == 1 and item in places]
    # The longest rising run of the second positions.
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, position) in enumerate(pairs):
        length = bisect_left(tails, position)
        before.append(ends[length - 1] if length else -1)
        if length == len(tails):
            tails.append(position)
            ends.append(index)
        else:
            tails[length], ends[length] = position, index
    result = []
    index = ends[-1] if ends else -1
    while index >= 0:
        result.append(pairs[index])
        index = before[index]
    return result[::-1]


def _compared(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[tuple[int, int]]:
    matcher = SequenceMatcher(None, old, new, autojunk=len(old) * len(new) > _THOROUGH)
    return [(block.a + k, block.b + k) for block in matcher.get_matching_blocks() for k in range(block.size)]
