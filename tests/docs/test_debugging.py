"""What docs/debugging.md shows of a debugger, which a page cannot run: pdb stops in generated code and shows its lines.
The rest of that page is run with the other pages.
"""

import io
import pdb
import sys

import pytest
import torch

import torchgraft


def test_pdb_stops_in_generated_code_and_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = torchgraft.capture(lambda x: torch.relu(x + 1), torch.ones(2))
    [relu] = program.graph.find_nodes(op="call_function", target=torch.relu)
    with program.graph.inserting_before(relu):
        stop = program.graph.call_function(breakpoint)
    shown = io.StringIO()
    typed = io.StringIO("p add.shape\nnext\nwhere\ncontinue\n")
    debugger = pdb.Pdb(stdin=typed, stdout=shown, nosigint=True, readrc=False)
    debugger.use_rawinput = False
    monkeypatch.setattr(sys, "breakpointhook", lambda: debugger.set_trace(sys._getframe(1)))
    before = sys.gettrace()
    try:
        assert torch.equal(program(torch.ones(2)), torch.full((2,), 2.0))
    finally:
        sys.settrace(before)
    assert "-> relu = torch.relu(add);  add = None" in shown.getvalue()
    assert "torch.Size([2])" in shown.getvalue()
    assert "return relu" in shown.getvalue()

    program.graph.erase_node(stop)
    assert "breakpoint" not in program.code
