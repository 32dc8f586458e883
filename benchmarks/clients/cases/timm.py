"""timm's FeatureGraphNet and GraphExtractNet, which are torchvision's feature extraction with leaf modules of timm's own."""

import torch

from benchmarks.clients.case import each, nodes, same
from benchmarks.coverage.torchvision_models import import_torchvision

import_torchvision()
import timm  # noqa: E402
from timm.models._features_fx import FeatureGraphNet, GraphExtractNet, get_graph_node_names  # noqa: E402

NETWORKS = (
    *(
        "convnext_atto",
        "cspresnet50",
        "densenet121",
        "dla34",
        "edgenext_xx_small",
        "efficientnet_b0",
        "ese_vovnet19b_dw",
    ),
    *("fbnetc_100", "ghostnet_100", "hardcorenas_a", "hrnet_w18_small", "inception_v4", "mixnet_s", "mnasnet_small"),
    *("mobilenetv2_050", "mobilenetv3_small_050", "nf_resnet26", "regnetx_002", "regnety_002", "repvgg_a0", "resnet18"),
    *(
        "resnet26d",
        "resnet50",
        "resnetv2_50",
        "res2net50_14w_8s",
        "seresnet50",
        "skresnet18",
        "selecsls42b",
        "tf_efficientnet_lite0",
    ),
    *(
        "tinynet_e",
        "vgg11",
        "vovnet39a",
        "xception41",
        "dpn48b",
        "gernet_s",
        "lcnet_050",
        "rexnet_100",
        "semnasnet_075",
    ),
)
TRANSFORMERS = (
    *("deit_tiny_patch16_224", "vit_tiny_patch16_224", "mixer_s32_224", "gmlp_ti16_224", "resmlp_12_224", "pit_ti_224"),
    *("xcit_nano_12_p16_224", "cait_xxs24_224", "convmixer_768_32", "swin_tiny_patch4_window7_224", "levit_128s"),
    *("visformer_tiny", "poolformer_s12", "twins_svt_small", "coat_lite_tiny", "crossvit_tiny_240", "mobilevit_xxs"),
)


def made(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    model = timm.create_model(name, num_classes=10).eval()
    size = model.default_cfg["input_size"]
    fixed = name in TRANSFORMERS or name in ("inception_v4",)
    return model, torch.randn(1, 3, *(size[1:] if fixed else (64, 64)))


@each(*(name for name in NETWORKS if name not in ("hrnet_w18_small",)))
def case_feature_graph_net(name):
    model, images = made(name)
    net = FeatureGraphNet(model, out_indices=tuple(range(len(model.feature_info)))[1:3]).eval()
    with torch.no_grad():
        features = net(images)
    numbers = [f"{feature.mean().item():.4f}" for feature in features]
    return [numbers, nodes(net.graph_module.graph), len(list(net.parameters()))]


@each(*NETWORKS, *TRANSFORMERS)
def case_whole_graph(name):
    model, images = made(name)
    last = get_graph_node_names(model)[1][-1]
    net = GraphExtractNet(model, [last], squeeze_out=True).eval()
    with torch.no_grad():
        same(net(images), model(images), atol=1e-4)
    return nodes(net.graph_module.graph)


@each("resnet18", "mobilenetv2_050", "efficientnet_b0", "vit_tiny_patch16_224", "mixer_s32_224", "regnety_002")
def case_backward(name):
    model, images = made(name)
    model.train()
    last = get_graph_node_names(model)[0][-1]
    net = GraphExtractNet(model, [last], squeeze_out=True).train()
    net(torch.cat([images, images])).mean().backward()
    return [name for name, parameter in net.named_parameters() if parameter.grad is not None]


@each("resnet18", "efficientnet_b0")
def case_features_only_by_name(name):
    _, images = made(name)
    extractor = timm.create_model(name, features_only=True, feature_cls="fx", out_indices=(1, 3)).eval()
    return [list(map(list, (feature.shape for feature in extractor(images)))), extractor.feature_info.channels()]


@each("resnet18", "vit_tiny_patch16_224")
def case_torchscript(name):
    model, images = made(name)
    net = GraphExtractNet(model, [get_graph_node_names(model)[1][-1]], squeeze_out=True).eval()
    with torch.no_grad():
        (output,) = torch.jit.script(net.graph_module)(images).values()
        same(output, model(images), atol=1e-4)
