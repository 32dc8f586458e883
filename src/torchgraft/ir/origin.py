"""Where a node came from: the user's source line and the chain of modules it was called through.
Capturing writes an origin for every node, so it is a small tuple; texts are made from it only when somebody asks.

An origin is `(code, instruction, scope)`. `code` and `instruction` name one bytecode instruction of the user's function
(turning it into a line number costs more than recording it). `scope` is the innermost module call, a linked chain
`(outer scope or None, key, module path, module type)` shared by every node made inside that call.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

Scope = tuple[Any, str, str, type]
Origin = tuple[CodeType | None, int, Scope | None]

_INTERNAL_FOLDERS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
# Code whose lines are a user's own although the file lies in an internal folder: the example models.
_USER_FOLDERS = (os.path.join(_INTERNAL_FOLDERS[0], "zoo") + os.sep,)
# What called the command line is the script that starts it, and nobody's program.
_COMMAND_FOLDER = os.path.join(_INTERNAL_FOLDERS[0], "cli") + os.sep


def asked_once(function: Callable[..., Any]) -> Any:
    """Remember what a function answers about a code object, and further plain values; `.answers` has what is remembered.

    By identity, because the hash of a code object is computed from everything in it. Holding the code keeps its id its own.
    """
    answers: dict[Any, tuple[CodeType, Any]] = {}

    @functools.wraps(function)
    def answer(code: CodeType, *rest: Any) -> Any:
        key = (id(code), *rest) if rest else id(code)
        known = answers.get(key)
        if known is None:
            if len(answers) > 100_000:
                answers.clear()
            known = answers[key] = code, function(code, *rest)
        return known[1]

    answer.answers = answers  # type: ignore[attr-defined]
    return answer


class SourceLine(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str
    text: str

    @property
    def place(self) -> str:
        """The file without its folders, and the number of the line: `model.py:41`."""
        return f"{os.path.basename(self.file)}:{self.line}"

    def __str__(self) -> str:
        return f'{self.file}:{self.line} "{self.text}"'


@asked_once
def is_user_code(code: CodeType) -> bool:
    """Whether code belongs neither to torch nor to torchgraft."""
    return bool(_belongs_to_user(code))


@asked_once
def _belongs_to_user(code: CodeType) -> bool | None:
    """The same; None for the command line, past which there is no user's code on a stack."""
    return None if code.co_filename.startswith(_COMMAND_FOLDER) else _is_user_file(code.co_filename)


def _is_user_file(name: str) -> bool:
    internal = name.startswith(_INTERNAL_FOLDERS) and not name.startswith(_USER_FOLDERS)
    return not internal and not name.startswith("<frozen ")


def user_instruction(depth: int = 1) -> tuple[CodeType | None, int]:
    """The innermost instruction on the stack that belongs neither to torch nor to torchgraft."""
    frame: FrameType | None = sys._getframe(depth)
    known = _belongs_to_user.answers
    while frame is not None:
        code = frame.f_code
        entry = known.get(id(code))
        is_user = entry[1] if entry is not None else _belongs_to_user(code)
        if is_user:
            return code, frame.f_lasti
        if is_user is None:
            break
        frame = frame.f_back
    return None, 0


def user_frame() -> FrameType | None:
    """The innermost frame on the stack that belongs neither to torch nor to torchgraft."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    return frame


def source_line(code: CodeType | None, instruction: int) -> SourceLine | None:
    """The file, line and text of an instruction, or None where there is no user code."""
    return None if code is None else _find_line(code, instruction)


# Finding a line means walking through all instructions before it, and guards ask for it right away.
@asked_once
def _find_line(code: CodeType, instruction: int) -> SourceLine:
    position = next(itertools.islice(code.co_positions(), max(instruction, 0) // 2, None), None)
    line = (position[0] if position else None) or code.co_firstlineno
    return SourceLine(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip())


def current_source_line() -> SourceLine | None:
    """The user's line that is running now."""
    return source_line(*user_instruction(2))


def at(line: SourceLine | None) -> str:
    """A line for the end of a sentence, if there is one."""
    return f" at {line}" if line else ""


def line_of_error(error: BaseException) -> SourceLine | None:
    """The innermost line of the user's that an error came through.

    >>> def forward(x):
    ...     return x + undefined
    >>> try:
    ...     forward(1)
    ... except NameError as error:
    ...     line_of_error(error).text
    'return x + undefined'
    """
    frames = [(frame.f_code, frame.f_lasti) for frame, _ in traceback.walk_tb(error.__traceback__)]
    # torch reasons about sizes with sympy, which is no user's code either; code made by exec has no text to show.
    for code, instruction in reversed(frames):
        if is_user_code(code) and f"{os.sep}sympy{os.sep}" not in code.co_filename:
            line = source_line(code, instruction)
            if line is not None and (line.text or not line.file.startswith("<")):
                return line
    return None


def stack_trace_text(origin: Origin) -> str | None:
    """The origin as Python writes a traceback entry, the form `node.stack_trace` has in torch.fx."""
    line = source_line(origin[0], origin[1])
    if line is None:
        return None
    return f'  File "{line.file}", line {line.line}, in {line.function}\n    {line.text}\n'


_TRACE_ENTRY = re.compile(r'^\s*File "(.+)", line (\d+)(?:, in (.+))?$')


def user_source_line(trace: str | None) -> SourceLine | None:
    """The innermost line of a traceback text that is the user's own; where none is, the innermost of all.

    >>> print(user_source_line('  File "model.py", line 8, in forward\\n    y = self.relu(x)\\n'))
    model.py:8 "y = self.relu(x)"
    """
    if not trace:
        return None
    lines = trace.splitlines()
    entries = []
    for number, line in enumerate(lines):
        found = _TRACE_ENTRY.match(line)
        if found is not None:
            text = lines[number + 1].strip() if number + 1 < len(lines) else ""
            is_text = text and not _TRACE_ENTRY.match(text)
            entries.append(SourceLine(found[1], int(found[2]), found[3] or "", text if is_text else ""))
    own = [entry for entry in entries if _is_user_file(entry.file)] or entries
    return own[-1] if own else None


def source_of(node: Any) -> SourceLine | None:
    """The user's line that made a node, whether it was written down while capturing or came along as the text of a traceback.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    >>> source_of(next(iter(program.graph.nodes))) is None
    True
    """
    if getattr(node, "_meta", True) is None:  # no metadata has been asked for: no need to make any
        origin: Origin | None = node._origin
        return None if origin is None else source_line(origin[0], origin[1])
    trace = node.meta.get("stack_trace")
    return user_source_line(trace) if isinstance(trace, str) else None


def module_stack(scope: Scope | None) -> dict[str, tuple[str, type]]:
    """The module calls around a node, outermost first, as torch.fx's `nn_module_stack`."""
    entries: list[tuple[str, tuple[str, type]]] = []
    while scope is not None:
        outer, key, path, module_type = scope
        entries.append((key, (path, module_type)))
        scope = outer
    return dict(reversed(entries))


def metadata(origin: Origin | None) -> dict[str, Any]:
    """The metadata entries of an origin."""
    result: dict[str, Any] = {}
    if origin is None:
        return result
    if origin[2] is not None:
        result["nn_module_stack"] = module_stack(origin[2])
    trace = stack_trace_text(origin)
    if trace is not None:
        result["stack_trace"] = trace
    return result
