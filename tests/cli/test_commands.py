"""What every command that looks at a program does besides printing: files, JSON, filters, exit codes, one line for mistakes."""

import json
import pickle
import stat

import pytest
import torch

from torchgraft.cli.main import main

FILE = """
import torch


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, ids, scale=None):
        y = self.linear(ids.float())
        return torch.relu(y) if scale is None else torch.relu(y) * scale


class Other(Twice):
    def forward(self, ids, scale=None):
        return torch.tanh(self.linear(ids.float()))


def layers():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())


class Branches(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Fails(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        raise RuntimeError("out of luck\\nand more") if self.linear(x).shape[0] == 1 else None
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "command_models.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def locked(tmp_path):
    """A folder that nobody may write to; as root, one that is a file."""
    folder = tmp_path / "locked"
    folder.write_text("a file, so that nothing can be made below it")
    return folder


def run(*arguments):
    return main([str(argument) for argument in arguments])


def output_of(capsys, *arguments, code=0):
    assert run(*arguments) == code
    text, error = capsys.readouterr()
    assert error == ""
    return text


def usage_error(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2
    text, error = capsys.readouterr()
    assert text == "" and error.count("\n") == 1 and error.startswith(f"graft {arguments[0]}: ")
    return error


# ---- capture ----


def test_capture_as_file(tmp_path, capsys):
    place = tmp_path / "mlp.pt"
    assert f"written: {place}" in output_of(capsys, "capture", "zoo:mlp", "-o", place)
    program = torch.load(place, weights_only=False)
    assert program(torch.ones(2, 16)).shape == (2, 16)
    assert [path.name for path in tmp_path.iterdir()] == ["mlp.pt"]


def test_capture_as_folder(tmp_path, capsys, monkeypatch):
    place = tmp_path / "kept_mlp"
    text = output_of(capsys, "capture", "zoo:mlp", "--level", "function", "-o", place)
    assert text.endswith(f"written: {place} (from kept_mlp import MLP)\n")
    monkeypatch.syspath_prepend(tmp_path)
    from kept_mlp import MLP

    assert MLP()(torch.ones(2, 16)).shape == (2, 16) and MLP.__name__ == "MLP"
    output_of(capsys, "capture", "zoo:mlp", "-o", place)  # an earlier one is replaced


def test_capture_as_folder_touches_no_other_files(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "module.py").write_text("mine = 1\n")
    assert run("capture", "zoo:mlp", "-o", tmp_path / "mine") == 1
    assert "it is a folder with other files in it\n  give the name of a new folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["module.py"]
    (tmp_path / "file").write_text("text")
    assert run("capture", "zoo:mlp", "-o", tmp_path / "file") == 1
    assert "it is a file" in capsys.readouterr().err and (tmp_path / "file").read_text() == "text"


def test_capture_as_folder_where_the_code_needs_the_name_of_the_class(tmp_path, capsys, monkeypatch):
    (tmp_path / "taken.py").write_text(
        "import torch\n\n\nclass inf(torch.nn.Module):\n    def forward(self, x):\n        return x.clamp(max=float('inf'))\n"
    )
    text = output_of(capsys, "capture", f"{tmp_path}/taken.py:inf", "--input", "2", "-o", tmp_path / "kept_inf")
    assert text.endswith("(from kept_inf import infProgram)\n")
    monkeypatch.syspath_prepend(tmp_path)
    from kept_inf import infProgram

    assert infProgram()(torch.ones(2)).tolist() == [1, 1]


def test_capture_json(file, capsys):
    text = output_of(capsys, "capture", f"{file}:Twice", "--input", "ids:2x4:int64", "--json")
    data = json.loads(text)
    assert data["calls"] == {".float": 1, "Linear": 1, "torch.relu": 1} and data["kept_whole"] == {}


def test_capture_where_nothing_can_be_written(locked, capsys):
    assert run("capture", "zoo:mlp", "-o", locked / "mlp.pt") == 1
    error = capsys.readouterr().err
    assert error.startswith("graft capture: cannot write ") and error.count("\n  give a path ") == 1


# ---- show ----


@pytest.mark.parametrize("level", ["symbolic", "module", "function", "aten", "core_aten", "joint"])
def test_show_every_level(level, capsys):
    text = output_of(capsys, "show", "zoo:mlp", "--level", level)
    assert "def forward(self" in text and "\033" not in text


def test_show_json_and_file(tmp_path, capsys):
    place = tmp_path / "program.json"
    assert output_of(capsys, "show", "zoo:mlp", "--json", "-o", place) == f"written: {place}\n"
    nodes = json.loads(place.read_text())["nodes"]
    assert [node["name"] for node in nodes if node["op"] == "call_module"] == ["fc1", "relu", "fc2"]
    assert next(node for node in nodes if node["name"] == "fc1")["value"] == "f32[1, 32]"


def test_named_inputs(file, capsys):
    text = output_of(capsys, "show", f"{file}:Twice", "--input", "ids:1x4:int64", "--input", "scale=scalar")
    assert "i64[1, 4]" in text and "mul" in text


def test_exported_file(tmp_path, capsys):
    place = tmp_path / "relu.pt2"
    torch.export.save(torch.export.export(torch.nn.Sequential(torch.nn.ReLU()), (torch.ones(3),)), place)
    assert "aten.relu.default" in output_of(capsys, "show", place)
    assert "aten.relu.default" in output_of(capsys, "calls", place, "--level", "dispatch")
    broken = tmp_path / "broken.pt2"
    broken.write_text("no zip")
    assert "it is no file that torch.export.save() wrote" in usage_error(capsys, "show", broken)
    assert "no file" in usage_error(capsys, "show", tmp_path / "missing.pt2")


# ---- summary, draw, graph ----


def test_summary(tmp_path, capsys):
    assert output_of(capsys, "summary", "zoo:mlp", "--depth", "0").count("Linear") == 0
    data = json.loads(output_of(capsys, "summary", "zoo:mlp", "--json"))
    assert [row["path"] for row in data["modules"]] == ["", "fc1", "fc2", "relu"]
    assert "there is no column 'colour'" in usage_error(capsys, "summary", "zoo:mlp", "--columns", "output,colour")
    assert "--depth" in usage_error(capsys, "summary", "zoo:mlp", "--depth", "-1")


def test_draw(tmp_path, capsys):
    place = tmp_path / "mlp.svg"
    assert output_of(capsys, "draw", "zoo:mlp", "-o", place).startswith(f"written: {place} (")
    assert place.read_text().startswith("<svg") and "fc1" in place.read_text() and "1×32" in place.read_text()
    assert json.loads(output_of(capsys, "draw", "zoo:mlp", "-o", place, "--level", "joint", "--json"))["boxes"] > 10


def test_draw_mistakes(tmp_path, locked, capsys):
    assert run("draw", "zoo:mlp", "-o", tmp_path / "mlp.bmp") == 1
    assert capsys.readouterr().err.endswith("\n  use .svg, .png or .pdf\n")
    assert run("draw", "zoo:mlp", "-o", locked / "mlp.svg") == 1
    assert capsys.readouterr().err.count("\n  give a path ") == 1
    assert "-o" in usage_error(capsys, "draw", "zoo:mlp")
    assert [path.name for path in tmp_path.iterdir()] == ["locked"]


def test_graph(tmp_path, capsys):
    place = tmp_path / "mlp.pickle"
    assert "36 nodes" in output_of(capsys, "graph", "zoo:mlp", "--level", "joint", "-o", place)
    graph = pickle.loads(place.read_bytes())
    assert {"primals_1", "tangents_1"} <= set(graph.nodes)
    output_of(capsys, "graph", "zoo:mlp", "-o", tmp_path / "mlp.me", "--format", "model-explorer")
    assert "graphs" in json.loads((tmp_path / "mlp.me").read_text()) or (tmp_path / "mlp.me").stat().st_size
    assert run("graph", "zoo:mlp", "-o", tmp_path / "mlp.unknown") == 1
    assert "the formats are" in capsys.readouterr().err


# ---- calls, record ----


def test_calls(tmp_path, capsys):
    data = json.loads(output_of(capsys, "calls", "zoo:mlp", "--json"))
    names = ["torch.nn.functional.linear", "torch.nn.functional.relu", "torch.nn.functional.linear"]
    assert [call["name"] for call in data["calls"]] == names
    assert "torch.nn.functional.relu" in output_of(capsys, "calls", "zoo:mlp", "--module", "relu")
    trace = tmp_path / "trace.json"
    output_of(capsys, "calls", "zoo:mlp", "--trace", "-o", trace)
    assert len(json.loads(trace.read_text())["traceEvents"]) >= 3


def test_model_that_fails_midway(file, tmp_path, capsys):
    for command in (["calls"], ["record"], ["capture"], ["report", "-o", str(tmp_path / "out")], ["show"]):
        assert run(command[0], f"{file}:Fails", "--input", "1x4", *command[1:]) == 1, command
        text, error = capsys.readouterr()
        assert text == "" and "out of luck" in error.splitlines()[0] and "Traceback" not in error
        assert all(line.startswith("  ") for line in error.splitlines()[1:])
        assert "`" not in error, "words for Python"
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == "") in ([], ["__pycache__"])


def test_errors_of_the_model_name_its_line(file, capsys):
    assert run("show", f"{file}:Fails", "--input", "1x4") == 1
    line = [text.strip() for text in FILE.splitlines()].index(
        'raise RuntimeError("out of luck\\nand more") if self.linear(x).shape[0] == 1 else None'
    )
    error = capsys.readouterr().err
    assert error.startswith(
        f'graft show: the code of the model raised RuntimeError: out of luck\n  at {file}:{line + 1} "raise RuntimeError('
    )
    assert run("show", f"{file}:Branches") == 1
    error = capsys.readouterr().err
    assert "cannot branch on a traced value" in error.splitlines()[0]
    assert error.splitlines()[-1].startswith("  or add --input x:SIZES, such as x:2x16")
    assert error.endswith(", and the model is captured by running it\n")


def test_what_started_the_command_is_no_line_of_the_model(file, capsys):
    for arguments in (["show"], ["show", "--input", "2x4"], ["calls", "--input", "2x4"]):
        text = output_of(capsys, arguments[0], f"{file}:layers", *arguments[1:])
        assert (
            ('self, "1")' in text or "functional.relu" in text)
            and "test_commands" not in text
            and "output_of" not in text
        )
    assert "command_models.py" in output_of(capsys, "calls", f"{file}:Twice", "--input", "2x4:int64:9")


def test_numbers_that_are_none(capsys):
    for text in ("x", "-1", "1.5", ""):
        error = usage_error(capsys, "summary", "zoo:mlp", f"--depth={text}")
        assert f"--depth: give a whole number, 0 or more, not '{text}'; see graft summary --help" in error


def test_record(tmp_path, capsys):
    text = output_of(capsys, "record", "zoo:mlp", "--nodes", "fc1", "--nodes", "re*")
    assert "fc1" in text and "relu" in text and "fc2" not in text and "mean" in text
    place = tmp_path / "values.safetensors"
    assert output_of(capsys, "record", "zoo:mlp", "-o", place) == f"written: {place} (6 nodes)\n"
    from safetensors.torch import load_file

    assert load_file(place)["fc1"].shape == (1, 32)
    data = json.loads(output_of(capsys, "record", "zoo:mlp", "--reduce", "min,zeros", "--gradients", "--json"))
    assert any(row["gradient"] for row in data["nodes"]) and "max" not in data["nodes"][0]


def test_record_mistakes(capsys):
    assert "fc9" in usage_error(capsys, "record", "zoo:mlp", "--nodes", "fc9")
    assert "there is no statistic 'minn'" in usage_error(capsys, "record", "zoo:mlp", "--reduce", "minn")
    assert "level joint" in usage_error(capsys, "record", "zoo:mlp", "--level", "joint")


# ---- compare, diff ----


def test_compare(file, capsys):
    model = f"{file}:Twice"
    inputs = ["--input", "2x4:int64"]
    assert "no difference" in output_of(capsys, "compare", model, "--against", "core_aten", *inputs)
    assert "no difference" in output_of(capsys, "compare", "zoo:mlp", "--passes", "remove-dead-code")
    data = json.loads(output_of(capsys, "compare", model, f"{file}:Other", *inputs, "--json", code=1))
    assert data["ok"] is False and data["first_difference"] == "tanh"


def test_diff(file, capsys):
    model, inputs = f"{file}:Twice", ["--input", "2x4:int64"]
    text = output_of(capsys, "diff", model, f"{file}:Other", *inputs, code=1)
    assert "relu" in text and "tanh" in text and "\033" not in text
    assert "same" in output_of(capsys, "diff", model, model, *inputs)
    assert "did you mean 'fuse-conv-norm'" in usage_error(capsys, "diff", "zoo:mlp", "--passes", "fuse-conv-nor")
    assert "nothing to compare with" in usage_error(capsys, "compare", "zoo:mlp")


def test_diff_of_models_with_other_inputs(capsys):
    text = output_of(capsys, "diff", "zoo:mlp", "zoo:deep_recommender", code=1)
    assert "- x = input('x')  # f32[1, 16]" in text
    assert "+ ratings = input('ratings')  # f32[1, 17768]" in text


# ---- all of them ----


@pytest.mark.parametrize(
    "command", ["capture", "show", "summary", "draw", "calls", "record", "compare", "graph", "diff", "doctor", "report"]
)
def test_unknown_model_is_one_line_and_code_2(command, tmp_path, capsys):
    options = {"draw": ["-o", "x.svg"], "graph": ["-o", "x.json"], "compare": ["zoo:mlp"], "diff": ["zoo:mlp"]}
    assert "no model named 'resnet49'" in usage_error(capsys, command, "zoo:resnet49", *options.get(command, []))


def test_colours_on_a_terminal_only(capsys, monkeypatch):
    assert "\033" not in output_of(capsys, "show", "zoo:mlp")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "\033" in output_of(capsys, "show", "zoo:mlp", "--level", "aten")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in output_of(capsys, "show", "zoo:mlp", "--level", "aten")


def test_written_files_are_readable_by_their_owner(tmp_path, capsys):
    place = tmp_path / "summary.txt"
    output_of(capsys, "summary", "zoo:mlp", "-o", place)
    assert place.stat().st_mode & stat.S_IRUSR and place.read_text().startswith("module")
