"""Errors that a model goes on after: which instructions of a function, and which calls further out, have an `except` around them.
A program cannot do that, so what is called there is kept whole; that is decided in `watch.py`.
"""

from __future__ import annotations

import dis
from types import CodeType, FrameType
from typing import Any

from torchgraft.ir.origin import asked_once, is_user_code

# What torch raises when it cannot do something; around a call further out, other errors are none of a model's values.
_RAISED_BY_TORCH = frozenset(
    {"RuntimeError", "Exception", "BaseException", "NotImplementedError", "IndexError", "ValueError"}
)


class _Handlers:
    """Where a function goes on after an error: after any, and after one that torch raises."""

    __slots__ = ("of_any", "of_torch")

    def __init__(self, code: CodeType) -> None:
        self.of_any: list[range] = []
        self.of_torch: list[range] = []
        if code.co_exceptiontable:
            self._find(code)

    def _find(self, code: CodeType) -> None:
        listing = dis.Bytecode(code)
        following = [item for item in listing if item.opname not in ("CACHE", "RESUME", "NOP")]
        places = {item.offset: place for place, item in enumerate(following)}
        entries = listing.exception_entries  # type: ignore[attr-defined]
        for entry in sorted(
            entries, key=lambda entry: -entry.target
        ):  # a handler around a handler comes later in the code
            place = places.get(entry.target)
            start = [] if place is None else following[place : place + 8]
            names = [item.opname for item in start]
            if names[:1] != ["PUSH_EXC_INFO"]:
                continue
            # What belongs to `with` and `finally` raises again.
            if "WITH_EXCEPT_START" in names:
                is_except = is_torchs = "suppress" in code.co_names
            else:
                is_bare = names[1:2] == ["POP_TOP"]
                is_except = is_bare or "CHECK_EXC_MATCH" in names
                is_torchs = is_bare or not _RAISED_BY_TORCH.isdisjoint([str(item.argval) for item in start])
                is_except = (
                    is_except
                    and not _is_about_kernels(following[place:])
                    and _goes_on(following, entries, entry.target, self.of_any)
                )
            if is_except:
                places_within = range(entry.start, entry.end)
                self.of_any.append(places_within)
                # Around an import, it is about what is installed.
                if is_torchs and not any(
                    item.opname == "IMPORT_NAME" and item.offset in places_within for item in following
                ):
                    self.of_torch.append(places_within)


@asked_once
def _handlers(code: CodeType) -> _Handlers:
    return _Handlers(code)


def is_handled(code: CodeType | None, instruction: int) -> bool:
    """Whether the function that runs an instruction goes on if it raises: there is an `except` around it."""
    if code is None or not code.co_exceptiontable:
        return False
    return any(instruction in places for places in _handlers(code).of_any)


def recovers(code: CodeType) -> bool:
    """Whether a function goes on after some error of torch's."""
    return bool(code.co_exceptiontable) and bool(_handlers(code).of_torch)


def recovering_frame(frame: FrameType | None, last: CodeType | None) -> FrameType | None:
    """The innermost function of the user's that would go on after an error of torch's, as far out as that of `last`."""
    while frame is not None and frame.f_code is not last:
        code = frame.f_code
        if code.co_exceptiontable and is_user_code(code):
            if any(frame.f_lasti in places for places in _handlers(code).of_torch):
                return frame
        frame = frame.f_back
    return None


def _is_about_kernels(listing: list[dis.Instruction]) -> bool:
    """Whether a handler is for NotImplementedError alone: what torch cannot do on a device, whatever the values are. A program
    raises that, too."""
    end = next((place for place, item in enumerate(listing) if place and item.opname == "PUSH_EXC_INFO"), len(listing))
    tests = [place for place, item in enumerate(listing[:end]) if item.opname == "CHECK_EXC_MATCH"]
    return len(tests) == 1 and [item.argval for item in listing[1 : tests[0]]] == ["NotImplementedError"]


def _goes_on(listing: list[dis.Instruction], entries: list[Any], handler: int, handled: list[range]) -> bool:
    """Whether a handler ends by anything but raising (it takes the error off the stack, and no `RERAISE` follows), or what it
    raises is handled in turn."""
    ends = [entry.target for entry in entries if entry.start <= handler < entry.end and entry.lasti]
    end = min((place for place in ends if place > handler), default=listing[-1].offset + 1)
    # What cleans up after the handler is itself where an outer `try` sees the error come from.
    within = [item for item in listing if handler <= item.offset < end + 8]
    names = [item.opname for item in within if item.offset < end]
    return any(item.offset in places for item in within for places in handled) or any(
        name == "POP_EXCEPT" and names[place + 1 : place + 2] != ["RERAISE"] for place, name in enumerate(names)
    )
