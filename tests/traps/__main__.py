"""`python -m tests.traps [WORD ...]`: what becomes of every trap whose name has one of the words in it, or of all.
Says which entries of `known.py` are no longer true, and which are missing.
"""

from __future__ import annotations

import sys
from collections import Counter

import torch

from tests.traps.catalogue import TRAPS
from tests.traps.known import KNOWN
from tests.traps.runner import CRASH, WAYS, WRONG, judge, share_of_right


def main(words: list[str]) -> None:
    """Judge the chosen traps and print what is wrong with them."""
    torch.set_num_threads(1)
    traps = [trap for trap in TRAPS if not words or any(word in trap.name for word in words)]
    for way in WAYS:
        counts: Counter[str] = Counter()
        for trap in traps:
            verdicts = judge(trap, way)
            counts.update([verdict.kind for verdict in verdicts.values()])
            bad = {name: verdict for name, verdict in verdicts.items() if verdict.kind in (WRONG, CRASH)}
            known = KNOWN.get((trap.name, way), {})
            if bad:
                first, verdict = next(iter(bad.items()))
                new = bad.keys() - known.keys()
                print(
                    f"{verdict.kind:5} {way:8} {trap.name}{f' ({len(new)} NEW)' if new else ''}: {len(bad)} of "
                    f"{len(verdicts)}, {first}"
                )
                print(f"      {verdict.reason[:200]}")
            for name in known.keys() - bad.keys():
                print(f"FIXED {way:8} {trap.name}, {name}: take it out of known.py ({known[name]})")
            if words:
                print("\n".join(f"      {item.kind:8} {name}: {item.reason[:160]}" for name, item in verdicts.items()))
        share = share_of_right([judge(trap, way) for trap in traps])
        print(f"{way}: {len(traps)} traps, {dict(counts)}, {share:.1%} of the variations right\n")


if __name__ == "__main__":
    main(sys.argv[1:])
