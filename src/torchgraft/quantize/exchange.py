"""The reference form as other runtimes read it: each pair of quantize and dequantize as one `torch.fake_quantize_…` call on
floats, which the exporters of torch.onnx and the converter of OpenVINO turn into their own. What they make of it is theirs.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.codegen.graph_module import GraphModule, with_own_graph
from torchgraft.ir.node import Node
from torchgraft.passes.attributes import References
from torchgraft.passes.layer_calls import parameter_of
from torchgraft.passes.remove_dead_code import RemoveDeadCode
from torchgraft.quantize.operators import dequantize_tensor, quantize_tensor
from torchgraft.quantize.preparing import drop_unused, inherit


def to_fake_quantize(program: GraphModule) -> GraphModule:
    """A program that computes with floats what the reference form computes with integers, and still says where they are.

    Hand it to `torch.onnx.export` or `openvino.convert_model`: both know the calls and run integers in their place.

    >>> import torchgraft
    >>> model = torchgraft.zoo.create("mlp").eval()
    >>> program = torchgraft.quantize.quantize(model, [torch.randn(8, 16)], backend="reference")
    >>> x = torch.randn(2, 16)
    >>> torch.allclose(to_fake_quantize(program)(x), program(x), atol=1e-6)
    True
    """
    result = with_own_graph(program)
    with torch.no_grad():
        for node in list(result.graph.nodes):
            if node.op == "call_function" and node.target is dequantize_tensor:
                _replace(result, node)
    RemoveDeadCode().run(result)
    drop_unused(result)
    result.graph.lint()
    return result


def _replace(program: GraphModule, node: Node) -> None:
    steps, scale, zero_point = [parameter_of(item, program) for item in node.args[:3]]
    if scale is None or (zero_point is None and node.args[2] is not None) or node.kwargs.get("group") is not None:
        return
    source: Any = node.args[0]
    if steps is not None:
        _replace_weight(program, node, steps, scale, zero_point)
    elif source.target is quantize_tensor and scale.dim() == 0 and len(node.args) == 3:
        value, low, high = source.args[0], source.args[3], source.args[4]
        zero = 0 if zero_point is None else int(zero_point.item())
        node.target = torch.fake_quantize_per_tensor_affine
        node._set_arguments((value, float(scale.item()), zero, low, high), {})


def _replace_weight(
    program: GraphModule, node: Node, steps: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> None:
    if steps.dtype not in (torch.int8, torch.uint8):
        return
    options: dict[str, Any] = {key: value for key, value in node.kwargs.items() if key in ("dtype", "axis")}
    graph, references = program.graph, References(program)
    stem = node.args[0].target
    with graph.inserting_before(node):
        path = references.put_new(f"{stem}_floats", dequantize_tensor(steps, scale, zero_point, **options))
        floats = graph.get_attr(path)
        if scale.dim():
            zeros = torch.zeros_like(scale, dtype=torch.int32) if zero_point is None else zero_point
            kept = graph.get_attr(references.put_new(f"{stem}_zeros", zeros))
            inherit(kept, node)
            spread: tuple[Any, ...] = (node.args[1], kept, node.kwargs.get("axis", 0))
        else:
            spread = (float(scale.item()), 0 if zero_point is None else int(zero_point))
    inherit(floats, node)
    node.target = torch.fake_quantize_per_channel_affine if scale.dim() else torch.fake_quantize_per_tensor_affine
    limits = torch.iinfo(steps.dtype)
    node._set_arguments((floats, *spread, limits.min, limits.max), {})
