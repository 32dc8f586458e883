"""The models of torchvision: classification, segmentation, detection, video and optical flow, with random weights.
Where torchvision's compiled operators do not load, the ones that detection needs are given in Python here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.coverage.cases import Case, Inputs, MakeInputs, images

SCHEMAS = """
nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor
_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor
roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) -> (Tensor, Tensor)
_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, SymInt pooled_height, SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor
ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio) -> (Tensor, Tensor)
_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor
ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) -> (Tensor, Tensor)
_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, SymInt pooled_height, SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor
qroi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, int sampling_ratio, bool aligned) -> Tensor
deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor
_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
"""  # noqa: E501


@cache
def import_torchvision() -> ModuleType:
    """torchvision, whose import needs the schemas of its operators to exist."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchvision is not installed; make coverage makes an environment that has it")
    try:
        torch.ops.load_library(spec.origin.replace("__init__.py", "_C.so"))
    except OSError:
        _declare_operators()
    import torchvision

    if _declared:
        # It asks whether its library was loaded; without, `roi_align` would be compiled, which takes a minute.
        for module in (torchvision.extension, sys.modules["torchvision.ops.roi_align"]):
            module._has_ops = lambda: True
    return torchvision


_declared: list[torch.library.Library] = []


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "DEF")
    for line in SCHEMAS.strip().splitlines():
        library.define(line)
    library.impl("nms", _nms, "CPU")
    library.impl("roi_align", _roi_align, "CompositeImplicitAutograd")
    # A library that is collected takes its operators with it.
    _declared.append(library)


def _nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """The boxes that overlap no better one by more than the threshold, best first."""
    from torchvision.ops import box_iou

    order = scores.argsort(descending=True, stable=True)
    overlaps = (box_iou(boxes[order], boxes[order]) > threshold).tolist()
    kept: list[int] = []
    for index in range(len(overlaps)):
        if not any(overlaps[better][index] for better in kept):
            kept.append(index)
    return order[torch.tensor(kept, dtype=torch.int64)]


def _roi_align(
    features: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, samples: int, aligned: bool
) -> torch.Tensor:
    """A grid of averages over each region, every one taken of `samples` by `samples` points between the pixels."""
    samples = max(samples, 1)
    boxes = rois[:, 1:] * scale - (0.5 if aligned else 0.0)
    start, extent = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    if not aligned:
        extent = extent.clamp(min=1.0)
    axes = []
    for axis, (count, pixels) in enumerate(((width, features.shape[3]), (height, features.shape[2]))):
        steps = (torch.arange(count * samples, device=rois.device) + 0.5) / (count * samples)
        place = start[:, axis, None] + extent[:, axis, None] * steps
        axes.append(2 * place / max(pixels - 1, 1) - 1)
    x, y = axes[0][:, None, :], axes[1][:, :, None]
    grid = torch.stack(torch.broadcast_tensors(x, y), dim=-1)
    chosen = features[rois[:, 0].long()]
    points = nn.functional.grid_sample(chosen, grid.to(features.dtype), padding_mode="border", align_corners=True)
    return nn.functional.avg_pool2d(points, samples)


# More than 140 million parameters, each of an architecture that is here at a smaller size.
TOO_LARGE = [
    "convnext_large",
    "regnet_y_32gf",
    "regnet_y_128gf",
    "vgg19",
    "vgg19_bn",
    "vit_h_14",
    "vit_l_16",
    "vit_l_32",
]


def cases() -> Iterator[Case]:
    """One case for every registered model that is not too large."""
    import_torchvision()
    from torchvision import models

    for name in sorted(set(models.list_models()) - set(TOO_LARGE)):
        kind = models.get_model_builder(name).__module__.removeprefix("torchvision.models.").partition(".")[0]
        yield _CASES.get(kind, _classification)(name)


def _case(
    name: str, example: MakeInputs, values: MakeInputs, batch: MakeInputs, size: MakeInputs, **options: Any
) -> Case:
    others = {"values": values, "batch": batch, "size": size}
    return Case("torchvision", name, partial(_build, name, options), example, others)


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    from torchvision import models
    from torchvision.models.video import mvit

    # Its builders fix the size of the video, which takes seconds a run; the function behind them does not.
    make = mvit._mvit
    small = {"spatial_size": (64, 64), "temporal_size": 4}
    with mock.patch.object(mvit, "_mvit", lambda **given: make(**{**given, **small})):
        return models.get_model(name, weights=None, **options)


def _classification(name: str) -> Case:
    options: dict[str, Any] = {"init_weights": False} if name.endswith(("inception_v3", "googlenet")) else {}
    if name.startswith("vit_"):
        options["image_size"] = 64
    size = {"inception_v3": 96, "quantized_inception_v3": 96, "maxvit_t": 224}.get(name, 64)
    pictures = images(3, 3, size, size)
    return _case(name, pictures, pictures, images(5, 3, size, size), images(3, 3, size + 32, size), **options)


def _segmentation(name: str) -> Case:
    options = {"weights_backbone": None} | ({} if name.startswith("lraspp") else {"aux_loss": True})
    pictures = images(3, 3, 64, 64)
    return _case(name, pictures, pictures, images(5, 3, 64, 64), images(3, 3, 96, 64), **options)


def _video(name: str) -> Case:
    batch, frames, size = 3, 4, 64 if name.startswith(("mvit", "swin3d")) else 32
    if name == "s3d":  # its last pooling takes no less
        batch, frames, size = 1, 16, 224
    videos = images(batch, 3, frames, size, size)
    larger = images(batch, 3, frames, size + 32, size)
    return _case(name, videos, videos, images(batch + 2, 3, frames, size, size), larger)


def _flow(name: str) -> Case:
    pairs = images(1, 3, 128, 128, count=2)
    return _case(name, pairs, pairs, images(2, 3, 128, 128, count=2), images(1, 3, 136, 128, count=2))


def _detection(name: str) -> Case:
    """Few candidates, and none left out for a low score: random weights are sure of nothing."""
    options: dict[str, Any] = {"weights_backbone": None, "num_classes": 5}
    if "rcnn" in name:
        options |= {"box_score_thresh": 0.0, "box_detections_per_img": 5}
        options |= {"rpn_pre_nms_top_n_test": 20, "rpn_post_nms_top_n_test": 20}
    else:
        options |= {"score_thresh": 0.0, "detections_per_img": 5, "topk_candidates": 20}
    if not name.startswith("ssd"):
        options |= {"min_size": 64, "max_size": 96}
    pictures = _list_of_images(2, 64)
    return _case(name, pictures, pictures, _list_of_images(3, 64), _list_of_images(2, 80), **options)


def _list_of_images(count: int, size: int) -> MakeInputs:
    return lambda: Inputs(([torch.rand(3, size, size) for _ in range(count)],))


_CASES = {"segmentation": _segmentation, "video": _video, "optical_flow": _flow, "detection": _detection}
