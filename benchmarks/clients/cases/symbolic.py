"""`symbolic_trace` itself on the models of torchvision, timm and the zoo: node for node where their code has no trap in it.

Which models have traps was found by comparing every node. In these `self.training` is read, or `+=` writes a value whose type or
memory cannot be known; what torchgraft records for that is left out of the comparison, and everything else is compared.
"""

import torch.fx

from benchmarks.clients.case import each, every_node, nodes
from benchmarks.coverage.torchvision_models import import_torchvision
from torchgraft import zoo

torchvision = import_torchvision()
import timm  # noqa: E402

VISION = (
    *("alexnet", "densenet121", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf"),
    *("regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1"),
    *("vgg11_bn", "vit_b_32", "wide_resnet50_2", "s3d"),
)
VISION_WITH_TRAPS = (
    *("convnext_tiny", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3", "maxvit_t"),
    *("swin_t", "swin_v2_t", "fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large", "r3d_18"),
    *("mvit_v1_b",),
)
TIMM = (
    *("dla34", "nf_resnet26", "resnet18", "resnet26d", "resnet50", "res2net50_14w_8s", "selecsls42b"),
    *("convmixer_768_32", "mixer_s32_224", "gmlp_ti16_224"),
    *("resmlp_12_224", "poolformer_s12", "convnext_atto", "visformer_tiny"),
)
TIMM_WITH_TRAPS = (
    *("cspresnet50", "edgenext_xx_small", "efficientnet_b0", "ese_vovnet19b_dw", "fbnetc_100"),
    *("ghostnet_100", "hardcorenas_a", "inception_v4", "mixnet_s", "mnasnet_small", "mobilenetv2_050"),
    *("mobilenetv3_small_050", "regnetx_002", "regnety_002", "repvgg_a0", "resnetv2_50", "seresnet50"),
    *("skresnet18", "tinynet_e", "vovnet39a", "xception41", "dpn48b", "gernet_s", "lcnet_050"),
    *("rexnet_100", "semnasnet_075", "deit_tiny_patch16_224", "vit_tiny_patch16_224", "pit_ti_224"),
    *("cait_xxs24_224", "xcit_nano_12_p16_224"),
)


def from_torchvision(name):
    backbone = {"weights_backbone": None} if name.startswith(("fcn", "deeplab", "lraspp")) else {}
    return torchvision.models.get_model(name, weights=None, **backbone)


@each(*VISION)
def case_every_node_of_torchvision(name):
    return every_node(torch.fx.symbolic_trace(from_torchvision(name).eval()).graph)


@each(*TIMM)
def case_every_node_of_timm(name):
    return every_node(torch.fx.symbolic_trace(timm.create_model(name).eval()).graph)


@each(*zoo.names())
def case_every_node_of_the_zoo(name):
    return every_node(torch.fx.symbolic_trace(zoo.create(name).eval()).graph)


@each("resnet18", "vgg11_bn", "mobilenet_v2", "densenet121", "regnet_y_400mf")
def case_every_node_in_training_mode(name):
    return every_node(torch.fx.symbolic_trace(from_torchvision(name).train()).graph)


@each(*VISION_WITH_TRAPS)
def case_all_but_traps_of_torchvision(name):
    return nodes(torch.fx.symbolic_trace(from_torchvision(name).eval()).graph)


@each(*TIMM_WITH_TRAPS)
def case_all_but_traps_of_timm(name):
    return nodes(torch.fx.symbolic_trace(timm.create_model(name).eval()).graph)
