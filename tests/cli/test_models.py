"""MODEL and --input on the command line: every form is read, and every mistake is one line and code 2."""

import argparse

import pytest
import torch
from torch import nn

from torchgraft.cli.models import add_model_arguments, chosen_model, load_model, read_inputs
from torchgraft.errors import GraftError

FILE = """
import dataclasses

import torch


@dataclasses.dataclass
class Options:
    width: int = 3


class Net(torch.nn.Module):
    def forward(self, x):
        return x


class Holder:
    made = Net()


def factory():
    return torch.nn.Linear(Options().width, 2)


def number():
    return 3


def fails():
    raise ValueError("first line\\nsecond line")


ready = Net()
text = "a model"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own_models.py"
    path.write_text(FILE)
    torch.save(nn.Linear(2, 2).state_dict(), f"{path}.pt")
    (tmp_path / "own_models.py.pth").write_text("no pickle")
    return str(path)


def chosen(*texts):
    parser = argparse.ArgumentParser(prog="graft doctor")
    add_model_arguments(parser)
    arguments = parser.parse_args(texts)
    arguments.prog = "graft doctor"
    return chosen_model(arguments)


# ---- models ----


def test_zoo():
    model, inputs, note = load_model("zoo:mlp")
    assert type(model).__name__ == "MLP"
    args, kwargs = inputs
    assert [tuple(tensor.shape) for tensor in args] == [(1, 16)] and kwargs == {} and note == ""


@pytest.mark.parametrize(
    ("name", "kind"), [("factory", "Linear"), ("Net", "Net"), ("ready", "Net"), ("Holder.made", "Net")]
)
def test_file(file, name, kind):
    model, inputs, _ = load_model(f"{file}:{name}")
    assert type(model).__name__ == kind and isinstance(model, nn.Module) and inputs is None


def test_module_by_name_in_the_current_folder(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere")
    (tmp_path / "models_of_this_test.py").write_text(FILE)
    assert type(load_model("models_of_this_test:factory")[0]).__name__ == "Linear"
    assert type(load_model("torch.nn:ReLU")[0]) is nn.ReLU


def test_file_named_like_another_module(tmp_path):
    path = tmp_path / "json.py"
    path.write_text(FILE)
    load_model(f"{path}:factory")
    import json

    assert json.dumps([1]) == "[1]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resnet50", "'resnet50': it does not say where the model is from\ndid you mean zoo:resnet50"),
        ("resnet49", "did you mean zoo:resnet34 or zoo:resnet50? `graft models` lists all"),
        ("qwertyuiop", "it does not say where the model is from\nwrite zoo:NAME, "),
        ("zoo:", "cannot read the model 'zoo:'"),
        ("{file}", "own_models.py is a file with Options, Net, Holder, factory, number, fails, ready\nwrite "),
        ("missing.pt", "no file 'missing.pt'"),
        (
            "{file}.pt",
            "own_models.py.pt holds an object of class OrderedDict, not a module\nsave the model itself, not its state_dict",
        ),
        ("{file}.pth", "cannot load "),
        (":name", "cannot read the model ':name'"),
        ("zoo:resnet49", "no model named 'resnet49' in torchgraft.zoo; did you mean "),
        (
            "nowhere.at.all:model",
            "cannot import nowhere.at.all: ModuleNotFoundError: No module named 'nowhere'\nwrite ",
        ),
        ("missing/file.py:model", "no file 'missing/file.py'\nwrite "),
        ("{file}:other", "it has Options, Net, Holder, factory, number, fails, ready"),
        ("{file}:number", "returned a int, not a module\nname a function that returns one"),
        ("{file}:text", "is of type str, not a module or a function that returns one"),
        ("{file}:fails", "without arguments raised ValueError: first line"),
        ("torch.nn:Linear", "calling torch.nn:Linear without arguments raised TypeError: "),
    ],
)
def test_mistakes(text, message, file, capsys):
    text = text.format(file=file)
    with pytest.raises(GraftError) as raised:
        load_model(text)
    assert message in str(raised.value)
    with pytest.raises(SystemExit) as end:
        chosen(text)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("graft doctor: ") and error.count("\n") == 1


def test_file_that_cannot_be_imported(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import nowhere_at_all\n")
    with pytest.raises(GraftError, match="cannot import .*broken.py: ModuleNotFoundError: No module named"):
        load_model(f"{path}:model")


# ---- inputs ----


def test_inputs():
    args, kwargs = read_inputs(
        "2x3x4:float32 5 2x6:int64:1000 mask=2x6:bool scalar:float64 2x2:complex64 3:bfloat16 ids:1x16:int64 "
        "scale:scalar".split()
    )
    assert [(tuple(value.shape), value.dtype) for value in args] == [
        ((2, 3, 4), torch.float32),
        ((5,), torch.float32),
        ((2, 6), torch.int64),
        ((), torch.float64),
        ((2, 2), torch.complex64),
        ((3,), torch.bfloat16),
    ]
    assert kwargs["mask"].dtype is torch.bool
    assert kwargs["ids"].shape == (1, 16) and kwargs["ids"].dtype is torch.int64 and kwargs["scale"].shape == ()
    assert args[2].max() > 10
    assert read_inputs(["20:int32"])[0][0].max() < 10


def test_inputs_are_the_same_every_time_and_touch_no_random_state():
    state = torch.get_rng_state()
    first, second = read_inputs(["2x3"])[0][0], read_inputs(["2x3"])[0][0]
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2xx3", "cannot read the input '2xx3'\nwrite sizes, dtype and"),
        ("-1x3", "cannot read the input '-1x3'"),
        ("", "cannot read the input ''"),
        ("2x3:float33", "torch has no dtype 'float33'\nwrite one such as float32"),
        ("2x3:nn", "torch has no dtype 'nn'"),
        ("2x3:float32:5", "only integers have a bound, and torch.float32 is none"),
        ("2x3:int64:0", "no integer is below the bound 0"),
    ],
)
def test_wrong_inputs(text, message, capsys):
    with pytest.raises(GraftError) as raised:
        read_inputs([text])
    assert message in str(raised.value)
    with pytest.raises(SystemExit) as end:
        chosen("zoo:mlp", f"--input={text}")
    assert end.value.code == 2
    assert capsys.readouterr().err == f"graft doctor: {raised.value}\n".replace("\nwrite", "; write")


def test_chosen_model():
    choice = chosen("zoo:mlp")
    assert not choice.model.training and choice.args[0].shape == (1, 16) and choice.kwargs == {}
    choice = chosen("zoo:mlp", "--train", "--input", "4x16")
    assert choice.model.training and choice.args[0].shape == (4, 16)
    choice = chosen("zoo:mlp", "--input", "x=4x16")
    assert choice.args == () and choice.kwargs["x"].shape == (4, 16)
    assert chosen("torch.nn:ReLU").args is None
