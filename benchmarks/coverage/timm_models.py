"""The models of timm: the smallest of every family, with random weights.
A family is a file of timm that registers models.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from benchmarks.coverage.cases import Case, images
from benchmarks.coverage.torchvision_models import import_torchvision

# The smallest model of each family by parameters; finding it anew builds 1,300 models.
SMALLEST = """
beit:beit_base_patch16_224 byoanet:eca_halonext26ts byobnet:test_byobnet cait:cait_xxs24_224 coat:coat_tiny
convit:convit_tiny convmixer:convmixer_768_32 convnext:test_convnext cpubone:cpubone_nano crossvit:crossvit_tiny_240
csatv2:csatv2 cspnet:cs3darknet_focus_s davit:davit_tiny deepseek_vit:deepseek_vit_412m deit:deit_tiny_patch16_224
densenet:densenet121 dla:dla46x_c dpn:dpn48b edgenext:edgenext_xx_small efficientformer:efficientformer_l1
efficientformer_v2:efficientformerv2_s0 efficientnet:test_efficientnet efficientvim:efficientvim_m1
efficientvit_mit:efficientvit_b0 efficientvit_msra:efficientvit_m0 eva:vit_tiny_patch16_dinov3_qkvb
fasternet:fasternet_t0 fastvit:fastvit_t8 focalnet:focalnet_tiny_srf gcvit:gcvit_xxtiny gemma4_vit:gemma4_vit_167m
ghostnet:ghostnet_050 hardcorenas:hardcorenas_b hgnet:hgnetv2_b0 hiera:hiera_tiny_224 hieradet_sam2:sam2_hiera_tiny
hrnet:hrnet_w18_small iformer:iformer_t inception_next:inception_next_atto inception_resnet_v2:inception_resnet_v2
inception_v3:inception_v3 inception_v4:inception_v4 lcnetv2:lcnetv2_small levit:levit_128s lowformer:lowformer_b0
mambaout:test_mambaout maxxvit:maxvit_pico_rw_256 metaformer:poolformerv2_s12 mlp_mixer:gmlp_ti16_224
mobilenetv3:mobilenetv3_small_050 mobilenetv5:mobilenetv5_base mobilevit:mobilevit_xxs mvitv2:mvitv2_tiny
naflexvit:naflexvit_base_patch16_parfac_gap nasnet:nasnetalarge nest:nest_tiny nextvit:nextvit_small nfnet:test_nfnet
pit:pit_ti_224 pnasnet:pnasnet5large pvt_v2:pvt_v2_b0 qwen3_vit:qwen3_vit_88m rdnet:rdnet_tiny regnet:regnetx_002
repghost:repghostnet_050 repvit:repvit_m1 res2net:res2next50 resnest:resnest14d resnet:test_resnet
resnetv2:resnetv2_18 rexnet:rexnet_100 selecsls:selecsls42 senet:legacy_seresnet18 sequencer:sequencer2d_s
shvit:shvit_s1 sknet:skresnet18 starnet:starnet_s050 swiftformer:swiftformer_xs
swin_transformer:swin_tiny_patch4_window7_224 swin_transformer_v2:swinv2_tiny_window8_256
swin_transformer_v2_cr:swinv2_cr_tiny_224 tiny_vit:tiny_vit_5m_224 tnt:tnt_s_legacy_patch16_224 tresnet:tresnet_m
twins:twins_svt_small vgg:vgg11 visformer:visformer_tiny vision_transformer:test_vit
vision_transformer_hybrid:vit_tiny_r_s16_p8_224 vision_transformer_relpos:vit_srelpos_small_patch16_224
vision_transformer_sam:samvit_base_patch16_224 vitamin:vitamin_small_224 volo:volo_d1_224 vovnet:ese_vovnet19b_slim_dw
xception:legacy_xception xception_aligned:xception41p xcit:xcit_nano_12_p8_224
"""
# Images of 64 by 64 are enough, but for these; a model that wants to know the size is told.
SIZE = 64
SIZES = {"byoanet": 256, "deepseek_vit": 56, "efficientformer": 224} | dict.fromkeys(
    ("inception_resnet_v2", "inception_v3", "inception_v4"), 96
)
# Fewer layers where even the smallest is large, but never so few that a kind of layer is lost.
_TWO_DEEP = (
    "beit deepseek_vit gemma4_vit naflexvit qwen3_vit tnt vision_transformer_relpos vision_transformer_sam vitamin"
)
_TWO_A_STAGE = "efficientformer swin_transformer swin_transformer_v2 swin_transformer_v2_cr twins"
OPTIONS: dict[str, dict[str, Any]] = {
    **{family: {"depth": 2} for family in _TWO_DEEP.split()},
    **{family: {"depths": (2, 2, 2, 2)} for family in _TWO_A_STAGE.split()},
    **{family: {"layers": (1, 1, 1, 1)} for family in ("res2net", "sequencer", "tresnet")},
    "vgg": {"mlp_ratio": 0.1},
}


def cases() -> Iterator[Case]:
    """One case for every family of the installed timm."""
    import_torchvision()
    import timm

    smallest = dict(pair.split(":") for pair in SMALLEST.split())
    for family in sorted(timm.list_modules()):
        registered = timm.list_models(module=family)
        if not registered:
            continue
        name, size = smallest.get(family) or registered[0], SIZES.get(family, SIZE)
        pictures = images(3, 3, size, size)
        # Patches are of 14, 16 or 32: half as large again keeps the number whole.
        others = {"values": pictures, "batch": images(5, 3, size, size), "size": images(3, 3, size + size // 2, size)}
        yield Case("timm", f"{family}: {name}", partial(_build, name, size, OPTIONS.get(family, {})), pictures, others)


def _build(name: str, size: int, options: dict[str, Any]) -> nn.Module:
    import timm

    if name.startswith("crossvit"):  # it scales pictures to its own two sizes
        return timm.create_model(name, pretrained=False, **options)
    try:
        return timm.create_model(name, pretrained=False, img_size=size, **options)
    except TypeError:
        return timm.create_model(name, pretrained=False, **options)
