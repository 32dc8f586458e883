"""Configurations: who wins, TOML in and out, and what is said about mistakes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchgraft
from torchgraft import QuantizeError
from torchgraft.quantize import Config, Numbers, Scheme, default_config, prepare, quantize
from torchgraft.quantize.config import BACKENDS, as_config
from torchgraft.quantize.plan import plan_of
from torchgraft.quantize.schemes import NAMED

names = st.sampled_from(sorted(NAMED))
keys = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)


def test_a_name_wins_over_a_pattern_a_type_and_a_function():
    config = Config(
        "float",
        modules={"a.b": "weight-int8", "a.*": "dynamic-int8"},
        types={torch.nn.Linear: "static-int8"},
        functions={torch.nn.functional.conv2d: "bf16"},
    )
    assert config.name_of("a.b", torch.nn.Linear) == "weight-int8"
    assert config.name_of("a.b.inner", torch.nn.Linear) == "weight-int8"
    assert config.name_of("a.c", torch.nn.Linear) == "dynamic-int8"
    assert config.name_of("x", torch.nn.Linear, torch.nn.functional.conv2d) == "static-int8"
    assert config.name_of("x", torch.nn.Conv2d, torch.nn.functional.conv2d) == "bf16"
    assert config.name_of("x", None) == "float"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_what_a_machine_cannot_run_is_said_with_what_it_can():
    model, data = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval(), [torch.ones(2, 4)]
    with pytest.raises(QuantizeError) as error:
        quantize(model, data, config="float8")
    assert str(error.value).splitlines()[0] == (
        "this machine has no kernel for the scheme 'float8', which wants a GPU with 8-bit floats"
    )
    assert "static-int8" in str(error.value)
    with pytest.raises(QuantizeError, match='there is no CUDA device for backend="cuda"'):
        quantize(model, data, backend="cuda")


def test_subclasses_of_a_type_count():
    class Mine(torch.nn.Linear):
        pass

    assert Config("float", types={"torch.nn.Linear": "bf16"}).name_of("x", Mine) == "bf16"


class Calling(torch.nn.Module):
    """A convolution and a linear layer, each called as a module and as a function."""

    def __init__(self):
        super().__init__()
        self.conv, self.line = torch.nn.Conv2d(3, 3, 1), torch.nn.Linear(4, 4)

    def forward(self, x):
        x = torch.conv2d(self.conv(x), self.conv.weight * 2)
        return torch.nn.functional.linear(self.line(x), self.line.weight + 1)


@pytest.mark.parametrize("level", ["function", "aten"])
@pytest.mark.parametrize("name", ["conv2d", "linear"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_function_goes_by_one_name_however_it_is_called(name, level, as_text):
    function = f"torch.nn.functional.{name}" if as_text else getattr(torch.nn.functional, name)
    x = torch.randn(2, 3, 4, 4)
    program = torchgraft.capture(Calling().eval(), x, level=level)
    config = Config(functions={function: "float"})
    stays = [layer.reason is not None for layer in plan_of(prepare(program, config=config)).layers.values()]
    assert stays == ([True, True, False, False] if name == "conv2d" else [False, False, True, True])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Config(types={torch.nn.LSTM: "float"}), "type 'torch.nn.LSTM'"),
        (Config(types={"torch.nn.Linaer": "float"}), "type 'torch.nn.Linaer'"),
        (Config(functions={"torch.nn.functional.linaer": "float"}), "function 'torch.nn.functional.linaer'"),
    ],
)
def test_what_no_layer_goes_by_is_refused(config, text):
    with pytest.raises(QuantizeError) as error:
        quantize(torch.nn.Sequential(torch.nn.Linear(4, 4)).eval(), [torch.ones(2, 4)], config=config)
    assert str(error.value) in (
        f"the configuration names {text}, and no layer goes by that\nlayers are: torch.nn.Linear",
        f"the configuration names {text}, and no layer goes by that\nlayers are: torch.nn.functional.linear",
    )


@given(names, st.dictionaries(keys, names, max_size=3), st.dictionaries(keys, names, max_size=2), st.booleans())
def test_toml_reads_back(scheme, modules, types, switch):
    config = Config(scheme, modules, types, equalize=switch)
    assert Config.from_text(str(config)) == config


def test_schemes_of_ones_own_read_back(tmp_path):
    own = Scheme(Numbers(4, True, True, "group", 64), Numbers(7), observer="entropy")
    config = Config("mine", schemes={"mine": own}, correct_bias=True)
    (tmp_path / "int.toml").write_text(str(config))
    assert Config.load(tmp_path / "int.toml") == config == as_config(tmp_path / "int.toml", "native")
    assert config.scheme_of("x", None) == own


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_a_default(backend):
    assert str(Config.from_text(str(default_config(backend)))) == str(default_config(backend))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Config("static-int9"), "no scheme is called 'static-int9'\ndid you mean"),
        (lambda: Config.from_text("scheme = 3 ="), "the configuration is no TOML"),
        (
            lambda: Config.from_text('scheem = "float"'),
            "the configuration has no entry 'scheem'\ndid you mean 'scheme' or 'schemes'?",
        ),
        (lambda: default_config("openvno"), "no backend is called 'openvno'\ndid you mean 'openvino'?"),
        (lambda: as_config(3, "native"), "expected a Config for config, got int"),
        (lambda: Numbers(9), "cannot use integers of 9 bits\nuse 2 to 8"),
        (lambda: Numbers(4, per="group"), "groups need a size"),
        (lambda: Numbers(per="chanel"), "unknown spread of scales 'chanel'"),
        (lambda: Config.from_text("modules = 3"), "expected names and their schemes for modules, got 3\n"),
        (lambda: Config.from_text("schemes = 3"), "expected names and their schemes for schemes, got 3\n"),
        (lambda: Config.from_text('equalize = "no"'), "expected true or false for equalize, got 'no'"),
        (
            lambda: Config.from_text("[schemes.x]\nwieghts = {}"),
            "cannot read the scheme 'x': Scheme got an unexpected keyword",
        ),
        (
            lambda: Config.from_text("[schemes.x]\nweights = {bit = 4}"),
            "cannot read the scheme 'x': Numbers got an unexpected",
        ),
        (lambda: Config.from_text('[schemes.x]\nweights = "int8"'), "expected Numbers for weights, got 'int8'"),
        (lambda: Config.from_text('[schemes.x]\nweights = {bits = "4"}'), "expected a whole number for bits, got '4'"),
        (lambda: Scheme(cast="float17"), "cannot cast to 'float17'\nuse one of: bfloat16, float16"),
        (lambda: as_config("nowhere.toml", "native"), "there is no file 'nowhere.toml'\n"),
    ],
)
def test_mistakes_are_said_in_a_line(make, text):
    with pytest.raises(QuantizeError) as error:
        make()
    assert str(error.value).startswith(text)
