"""Random programs with more for passes to do: every value computed twice, or handed through calls that change nothing.
The programs themselves are drawn in `tests/properties/strategies.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import strategies as st

from tests.properties.strategies import Program, programs

_ASSIGNMENT = re.compile(r"(?P<indent> *)(?P<name>v\d+) = (?P<value>.*)")
NO_OPS = (
    *("{0}.clone()", "torch.clone({0})", "{0}.view_as({0})", "F.dropout({0}, 0.5, False)", "F.dropout({0}, p=0.0)"),
    *("{0}.contiguous().contiguous()", "{0}.abs().abs()", "torch.relu(torch.relu({0}))", "{0}.type_as({0})"),
    *("{0}.transpose(-1, 0).transpose(0, -1)", "{0}.detach().detach()", "{0}.clone().clone()", "{0}.float().float()"),
)


def doubled(program: Program) -> Program:
    """The same with every value computed a second time, right after the first."""
    lines, copies = [], []
    for line in program.lines:
        lines.append(line)
        match = _ASSIGNMENT.fullmatch(line)
        if match:
            copy = match["name"].replace("v", "w")
            lines.append(f"{match['indent']}{copy} = {match['value']}")
            if not match["indent"]:
                copies.append(copy)
    return replace(program, lines=_with_result(lines, copies))


def _with_result(lines: list[str], names: list[str]) -> tuple[str, ...]:
    """Let the program also return a number made of every value named."""
    *body, last = lines
    total = " + ".join(f"{name}.float().sum()" for name in names) or "0"
    return (*body, f"return ({last.removeprefix('return ')}, {total})")


@st.composite
def doubled_programs(draw: st.DrawFn) -> Program:
    """Programs that compute things twice."""
    return doubled(draw(programs()))


@st.composite
def padded_programs(draw: st.DrawFn) -> Program:
    """Programs in which values pass through calls that change nothing."""
    program = draw(programs())
    lines = []
    for line in program.lines:
        lines.append(line)
        match = _ASSIGNMENT.fullmatch(line)
        if match and draw(st.booleans()):
            form = draw(st.sampled_from(NO_OPS))
            name = match["name"]
            target = draw(st.sampled_from([name, f"{name}_same"]))
            lines.append(f"{match['indent']}{target} = {form.format(name)}")
            if target != name and draw(st.booleans()):
                lines.append(f"{match['indent']}{name} = {target}")
    return replace(program, lines=tuple(lines))
