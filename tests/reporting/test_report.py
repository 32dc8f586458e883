"""A report holds everything that it promises, says what is unavailable, and leaves nothing behind where it fails."""

import json
import os
import pickle
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import zoo
from torchgraft.cli.main import main
from torchgraft.errors import GraftError, WriteError
from torchgraft.reporting import report

LEVELS = ("module", "function", "aten", "core_aten", "joint")


class Page(HTMLParser):
    """What a page links to, what it loads, its identities, and whether its elements are closed in order."""

    empty = frozenset("meta link input br hr img".split())

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.identities, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.identities += [values["id"]] if "id" in values else []
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.loaded += [values[name] for name in ("src", "srcset") if name in values]
        self.loaded += [values["href"]] if tag == "link" else []
        if tag not in self.empty:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reports") / "mlp"
    steps = []
    model = zoo.create("mlp").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torchgraft.follow_progress(lambda progress: steps.append(str(progress))):
        result = report(model, zoo.example_inputs("mlp"), folder=folder, name="zoo:mlp")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and not model.training
    result.__dict__["steps"] = steps
    return result


def test_machines_that_are_not_here(made):
    page = made.page.read_text()
    section = page[page.index('id="simulation"') : page.index('id="specialised"')]
    assert "NVIDIA H200" in section and "simulations of the run above" in section
    for name in torchgraft.machine_names():
        assert f"<td>{name}</td>" in section
    content = json.loads((made.page.parent / "simulation.json").read_text())
    assert {node["name"] for node in content["nodes"]} >= {"fc1", "relu", "fc2"}
    assert len(content["machines"]) == 2 * len(torchgraft.machine_names())


def test_files(made):
    folder = made.page.parent
    for level in LEVELS:
        for name in (f"graphs/{level}.pickle", f"graphs/{level}.graphml", f"graphs/{level}.json"):
            graph = torchgraft.load_graph(folder / name)
            assert graph.number_of_nodes() == made.seen.levels[level].counts.nodes
        assert (folder / f"drawings/{level}.svg").read_text().startswith("<svg")
        assert "def forward" in (folder / f"programs/{level}.py").read_text()
        assert (folder / f"programs/{level}-table.txt").read_text().count("\n") > 5
    assert "aten::linear" in (folder / "programs/jit_trace.txt").read_text()
    files = ("summary", "statistics", "diagnosis", "calls/function", "calls/dispatch", "calls/function-trace")
    for name in (*files, "simulation", "simulation-trace"):
        json.loads((folder / f"{name}.json").read_text())
    assert made.failures == [] and made.steps[0] == "running the model (1 of 6)" and made.steps[-1] == ""
    assert "drawing and writing (6 of 6): level aten (3 of 5)" in made.steps


def test_graphs_are_read_without_torch(made):
    graph = pickle.loads((made.page.parent / "graphs/joint.pickle").read_bytes())
    assert {name for name in graph.nodes if name.startswith("tangents")} == {"tangents_1"}


def test_page_is_whole_and_needs_nothing_else(made):
    text = made.page.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and page.loaded == ["data:,"]
    assert len(set(page.identities)) == len(page.identities)
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text) and "@import" not in text and "url(" not in text
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.identities, link
        else:
            assert (made.page.parent / unquote(link)).is_file(), link
    # Every file of the folder can be reached from the page.
    linked = {unquote(link) for link in page.links}
    files = {str(path.relative_to(made.page.parent)) for path in made.page.parent.rglob("*") if path.is_file()}
    assert files - linked == {"index.html", ".graft-report"}


def test_page_shows_every_part(made):
    text = made.page.read_text(encoding="utf-8")
    for part in ("levels", "level-joint", "summary", "calls", "statistics", "specialised", "failures", "files"):
        assert f'<section id="{part}">' in text
    assert "torch.nn.functional.linear" in text and "aten.addmm.default" in text and "aten::linear" in text
    assert text.count('class="histogram"') >= 4 and text.count('<svg xmlns="http://www.w3.org/2000/svg"') == 5


def test_five_facts(made):
    assert len(made.facts) == 5
    assert any("torch.jit.trace writes 10" in fact.text for fact in made.facts)
    assert str(made).splitlines()[-1] == f"page: {made.page}"


# ---- what is unavailable ----


class Numpy(nn.Module):
    """Runs in eager and is captured as one call; it has no gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.from_numpy(self.linear(x).detach().numpy() * 2)


def test_level_that_is_unavailable_does_not_stop_the_rest(tmp_path):
    made = report(Numpy(), torch.ones(2, 4), folder=tmp_path / "out")
    missing = [failure.what for failure in made.failures]
    assert "the program at level joint" in missing and "the program at level aten" not in missing
    text = made.page.read_text(encoding="utf-8")
    assert "Unavailable:" in text and (tmp_path / "out/graphs/aten.json").is_file()
    assert not (tmp_path / "out/graphs/joint.json").exists()
    assert any(fact.headline == "Missing" for fact in made.facts)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum().item() > -1e9 else -y


def test_what_capture_specialised_is_there_with_its_line(tmp_path):
    made = report(Branching(), torch.ones(2, 4), folder=tmp_path / "out")
    assert made.failures == []
    assert "y.sum().item() &gt; -1e9" in made.page.read_text(encoding="utf-8")


class NotFinite(nn.Module):
    def forward(self, x):
        return torch.log(x - 1) * 2


def test_values_that_are_not_finite_come_first(tmp_path):
    made = report(NotFinite(), torch.tensor([0.0, 1.0, 2.0]), folder=tmp_path / "out")
    assert made.facts[0].text == "3 values of the run with NaN; the first is 'log', with 1."
    assert 'class="n bad"' in made.page.read_text(encoding="utf-8")


class Hostile(nn.Module):
    """Names that would end an attribute, an element or a script, and a dict of results."""

    def __init__(self):
        super().__init__()
        self.add_module('</script><b a="x">&', nn.Linear(2, 2))

    def forward(self, x, *, scale=1.0):
        return {"<i>": next(iter(self.children()))(x) * scale, "shape": x.shape}


def test_hostile_names_and_keyword_inputs(tmp_path):
    made = report(Hostile(), (torch.ones(1, 2),), {"scale": 2.0}, folder=tmp_path / "out", name="<h1>&'\"")
    text = made.page.read_text(encoding="utf-8")
    assert "<b a=" not in text and "<h1>&'" not in text and "&lt;h1&gt;&amp;" in text
    Page(text)


class Training(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(x)


def test_model_stays_as_it_was_in_training_mode(tmp_path):
    model = Training().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.get_rng_state()
    made = report(model, torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), folder=tmp_path / "out")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers) and model.training
    assert made.failures == []


def test_training_program_where_training_mode_fails(tmp_path):
    made = report(Training().eval(), torch.ones(1, 3), folder=tmp_path / "out")
    level = made.seen.levels["joint"]
    assert level.program is not None
    assert "because in training mode: ValueError: Expected more than 1 value per channel" in level.notes[0]


# ---- failing as a whole ----


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("no luck\nat all")


def test_model_that_does_not_run(tmp_path):
    with pytest.raises(GraftError, match="the model itself raises ValueError: no luck\ngive inputs it accepts"):
        report(Fails(), torch.ones(1), folder=tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(GraftError, match="cannot report on a function"):
        report(lambda x: x, torch.ones(1), folder=tmp_path / "out")


def test_broken_off_midway_leaves_nothing(tmp_path):
    def interrupt(progress):
        if progress and progress[-1].what == "drawing and writing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), torchgraft.follow_progress(interrupt):
        report(nn.ReLU(), torch.ones(1), folder=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["index.html", "module.svg", "joint.graphml"])
def test_full_disk_leaves_nothing(name, tmp_path, monkeypatch):
    write_text, replace = Path.write_text, os.replace

    def refuse(path):
        if name in os.path.basename(path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", lambda path, *args, **more: (refuse(path), write_text(path, *args, **more)))
    monkeypatch.setattr(os, "replace", lambda source, target: (refuse(target), replace(source, target)))
    with pytest.raises(GraftError, match="No space left on device\n(nothing was written|give a path)"):
        report(nn.Linear(1, 1), torch.ones(1), folder=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for place, words in (("file", "it is a file"), ("file/below", "Not a directory")):
        with pytest.raises(WriteError, match=words):
            report(nn.ReLU(), torch.ones(1), folder=tmp_path / place)
    if os.geteuid() != 0:
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        with pytest.raises(WriteError, match="Permission denied\nnothing was written"):
            report(nn.ReLU(), torch.ones(1), folder=locked / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name != "locked"] == ["file"]


def test_folder_with_other_files_is_refused_before_the_work(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(WriteError, match=r"the folder holds other files, such as 'thesis.tex'\ngive a new folder"):
        report(Fails(), torch.ones(1), folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_older_report_is_replaced_whole_or_stays(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    report(nn.ReLU(), torch.ones(1), folder=folder)
    (folder / "left over").write_text("")
    first = (folder / "index.html").read_text(encoding="utf-8")
    with pytest.raises(GraftError):
        report(Fails(), torch.ones(1), folder=folder)
    assert (folder / "index.html").read_text(encoding="utf-8") == first and (folder / "left over").exists()
    report(nn.Tanh(), torch.ones(1), folder=folder)
    assert "Tanh" in (folder / "index.html").read_text(encoding="utf-8") and not (folder / "left over").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---- the command ----


def test_command(tmp_path, capsys):
    assert main(["report", "zoo:mlp", "-o", str(tmp_path / "out")]) == 0
    text, error = capsys.readouterr()
    assert error == "" and text.startswith("The 5 most interesting facts about zoo:mlp\n")
    page = text.splitlines()[-2].removeprefix("page: ")
    assert page == str(tmp_path / "out" / "index.html") and Path(page).is_file()
    assert main(["report", "zoo:mlp", "-o", str(tmp_path / "out"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["facts"]) == 5 and data["failures"] == []


def test_command_refuses(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["report", "zoo:mlp", "-o", str(tmp_path / "file")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("graft report: cannot write a report to ") and error.count("\n  give ") == 1
    with pytest.raises(SystemExit) as end:
        main(["report", "torch.nn:ReLU", "-o", str(tmp_path / "out")])
    assert end.value.code == 2 and "add --input input:SIZES, such as input:2x16" in capsys.readouterr().err


# ---- how often the model runs ----


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x):
        return self.blocks(x)


def forwards_of(step):
    """How often the model's own forward runs in a step; from outside, because a counter in it would be state of the model."""
    found = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "forward" and type(frame.f_locals.get("self")) is Counted:
            found.append(frame.f_lineno)

    sys.setprofile(profile)
    try:
        return step(), len(found)
    finally:
        sys.setprofile(None)


def test_the_model_runs_a_few_times_for_all_levels(tmp_path):
    model = Counted().eval()
    _, of_a_capture = forwards_of(lambda: torchgraft.capture(model, torch.ones(3, 4)))
    made, runs = forwards_of(lambda: report(model, torch.ones(3, 4), folder=tmp_path / "out"))
    assert made.failures == [] and all(made.seen.levels[name].program is not None for name in LEVELS)
    # The log of its calls, two captures, torch.jit.trace, and the check on the example and at one other size.
    assert 0 < of_a_capture <= 2 and runs == 1 + 2 * of_a_capture + 1 + 2
    # A training step normalises by the batch, although the model was captured in evaluation mode.
    joint = made.seen.levels["joint"]
    assert joint.notes == [] and any("native_batch_norm" in name for name in joint.counts.by_call)
    assert not model.training
    assert model.blocks[1].num_batches_tracked.item() == 0
