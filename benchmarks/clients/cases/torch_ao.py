"""torch.ao.quantization in its graph mode: fuse, prepare, convert, with configurations, backends and custom modules."""

import copy

import torch
import torch.ao.nn.intrinsic as intrinsic
import torch.ao.ns._numeric_suite_fx as numeric_suite
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    default_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.ao.quantization.quantize_fx import (
    convert_fx,
    convert_to_reference_fx,
    fuse_fx,
    prepare_fx,
    prepare_qat_fx,
)

from benchmarks.clients.case import each, nodes, same
from benchmarks.clients.models import Convolutional

torch.backends.quantized.engine = "qnnpack" if "qnnpack" in torch.backends.quantized.supported_engines else "fbgemm"
ENGINE = torch.backends.quantized.engine


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x):
        return self.layers(x.flatten(1)[:, :12])


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 12))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = F.relu(F.linear(x.flatten(1)[:, :12], self.weight))
        return torch.cat([self.layer(x), x.sigmoid()], dim=1).clamp(-1, 1)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.conv(self.conv(x)).mean((2, 3))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = Convolutional(), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(F.hardswish(self.inner(x)))


MODELS = {kind.__name__: kind for kind in (Convolutional, Layers, Functional, Shared, Nested)}


def images():
    return torch.randn(2, 3, 8, 8)


@each(**MODELS)
def case_prepare(kind):
    prepared = prepare_fx(kind().eval(), get_default_qconfig_mapping(ENGINE), (images(),))
    prepared(images())
    return [isinstance(prepared, torch.fx.GraphModule), nodes(prepared.graph), sorted(prepared.state_dict())]


@each(**MODELS)
def case_convert(kind):
    model = kind().eval()
    x = images()
    prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping(ENGINE), (x,))
    prepared(x)
    quantized = convert_fx(prepared)
    with torch.no_grad():
        out, expected = quantized(x), model(x)
    assert (out - expected).abs().max() < 0.3 * expected.abs().max() + 0.1
    return [nodes(quantized.graph), sorted(map(str, quantized.state_dict()))]


@each(**MODELS)
def case_reference(kind):
    x = images()
    prepared = prepare_fx(kind().eval(), get_default_qconfig_mapping(ENGINE), (x,))
    prepared(x)
    return nodes(convert_to_reference_fx(prepared).graph)


@each(**MODELS)
def case_training(kind):
    x = images()
    prepared = prepare_qat_fx(kind().train(), get_default_qat_qconfig_mapping(ENGINE), (x,))
    prepared(x).sum().backward()
    converted = convert_fx(prepared.eval())
    assert torch.isfinite(converted(x)).all()
    return [nodes(prepared.graph), nodes(converted.graph)]


@each("Layers", "Functional")
def case_dynamic(name):
    model = MODELS[name]().eval()
    x = images()
    mapping = (
        QConfigMapping()
        .set_object_type(nn.Linear, default_dynamic_qconfig)
        .set_object_type(nn.ReLU, default_dynamic_qconfig)
    )
    converted = convert_fx(prepare_fx(model, mapping, (x,)))
    assert torch.isfinite(converted(x)).all()
    return nodes(converted.graph)


@each(**MODELS)
def case_fuse(kind):
    model = kind().eval()
    fused, x = fuse_fx(copy.deepcopy(model)), images()
    with torch.no_grad():
        same(fused(x), model(x), rtol=1e-3, atol=1e-4)
    kinds = [
        type(module).__name__
        for module in fused.modules()
        if type(module).__module__ == intrinsic.ConvReLU2d.__module__
    ]
    return [nodes(fused.graph), kinds]


@each("name", "type", "regex", "none")
def case_mappings(how):
    mapping = {
        "name": lambda: QConfigMapping().set_module_name("inner.first", default_qconfig),
        "type": lambda: QConfigMapping().set_object_type(nn.Linear, default_qconfig),
        "regex": lambda: QConfigMapping().set_module_name_regex("inner.s.*", default_qconfig),
        "none": lambda: QConfigMapping().set_global(default_qconfig).set_module_name("inner", None),
    }[how]()
    x = images()
    prepared = prepare_fx(Nested().eval(), mapping, (x,))
    prepared(x)
    return [nodes(prepared.graph), nodes(convert_fx(prepared).graph)]


@each("non traceable", "preserved", "float modules")
def case_custom_configuration(how):
    model, x = Nested().eval(), images()
    model.note = "kept"
    custom = PrepareCustomConfig()
    convert_custom = ConvertCustomConfig()
    if how == "non traceable":
        custom.set_non_traceable_module_names(["inner"])
    elif how == "preserved":
        custom.set_preserved_attributes(["note"])
        convert_custom.set_preserved_attributes(["note"])
    else:
        custom.set_non_traceable_module_classes([Convolutional])
    prepared = prepare_fx(model, get_default_qconfig_mapping(ENGINE), (x,), prepare_custom_config=custom)
    prepared(x)
    converted = convert_fx(prepared, convert_custom_config=convert_custom)
    return [nodes(converted.graph), getattr(converted, "note", None)]


@each(**MODELS)
def case_copies(kind):
    x = images()
    prepared = prepare_fx(kind().eval(), get_default_qconfig_mapping(ENGINE), (x,))
    prepared(x)
    twin = copy.deepcopy(prepared)
    same(convert_fx(twin)(x), convert_fx(prepared)(x))


@each("Convolutional", "Layers")
def case_state_is_loaded(name):
    x = images()

    def made():
        return prepare_fx(MODELS[name]().eval(), get_default_qconfig_mapping(ENGINE), (x,))

    prepared, other = made(), made()
    prepared(x)
    other.load_state_dict(prepared.state_dict())
    same(convert_fx(other)(x), convert_fx(prepared)(x))


@each("Convolutional", "Layers")
def case_torchscript(name):
    x = images()
    prepared = prepare_fx(MODELS[name]().eval(), get_default_qconfig_mapping(ENGINE), (x,))
    prepared(x)
    quantized = convert_fx(prepared)
    same(torch.jit.script(quantized)(x), quantized(x))


@each("weights", "activations")
def case_numeric_suite(what):
    x = images()
    model = Convolutional().eval()
    prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping(ENGINE), (x,))
    prepared(x)
    quantized = convert_fx(copy.deepcopy(prepared))
    if what == "weights":
        found = numeric_suite.extract_weights("a", prepared, "b", quantized)
        return sorted(found)
    one, other = numeric_suite.add_loggers("a", prepared, "b", quantized, numeric_suite.OutputLogger)
    one(x)
    other(x)
    return sorted(numeric_suite.extract_logger_info(one, other, numeric_suite.OutputLogger, "b"))


def case_scopes_of_nodes():
    from torch.ao.quantization.fx.tracer import QuantizationTracer

    tracer = QuantizationTracer([], [])
    tracer.trace(Nested().eval())
    return {name: [path, str(kind.__name__)] for name, (path, kind) in tracer.node_name_to_scope.items() if kind}


@each("lowering", "qconfig", "equalization")
def case_details(what):
    from torch.ao.quantization import get_default_qconfig
    from torch.ao.quantization.fx._equalize import default_equalization_qconfig

    x = images()
    mapping = QConfigMapping().set_global(get_default_qconfig(ENGINE))
    options = {}
    if what == "equalization":
        options["_equalization_config"] = QConfigMapping().set_global(default_equalization_qconfig)
    prepared = prepare_fx(Layers().eval(), mapping, (x,), **options)
    prepared(x)
    converted = convert_fx(prepared)
    return [nodes(prepared.graph), nodes(converted.graph), sorted(str(meta) for meta in prepared.meta)]
