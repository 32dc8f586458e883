"""From the reference form to torch's own integer kernels: what stands between `dequantize_tensor` and `quantize_tensor` becomes
one call, and integers stay integers from one such call to the next. The calls are in `layers.py` and `functions.py`.

Whatever has no kernel stays as it is in the reference form, so that every program runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from torchgraft.codegen.graph_module import GraphModule, with_own_graph
from torchgraft.errors import QuantizeError
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.attributes import References
from torchgraft.passes.layer_calls import bound, is_layer, layer_arguments, parameter_of
from torchgraft.passes.remove_dead_code import RemoveDeadCode
from torchgraft.passes.views import has_written_views, reshape_instead, views_nobody_writes
from torchgraft.quantize.native.activations import PLAIN, average_options, options_of, pool_options, post_operation
from torchgraft.quantize.native.checks import drop_repeated_checks
from torchgraft.quantize.native.cuda import RowLinear
from torchgraft.quantize.native.functions import (
    WRITING,
    activate,
    activate_and_quantize,
    average_bytes,
    dequantize_fast,
    look_up,
    max_pool_bytes,
    quantize_fast,
    table_of,
)
from torchgraft.quantize.native.layers import (
    Convolution,
    DynamicLayer,
    IntegerLayer,
    IntegerLayerWithSum,
    IntegerLinear,
    PostOperation,
)
from torchgraft.quantize.native.reading import Reader, Steps, all_values, chain, is_call, only_user, writes_in_place
from torchgraft.quantize.native.weight_only import WeightOnlyLayer
from torchgraft.quantize.observers import Observer
from torchgraft.quantize.operations import ACTIVATIONS, MOVES, SELECTS, first_input, is_shape_read, is_sum, operation
from torchgraft.quantize.operators import dequantize_tensor, quantize_tensor
from torchgraft.quantize.plan import KEY
from torchgraft.quantize.preparing import drop_unused, inherit

# What only says of which shape a value is.
_SHAPES = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze"})


def to_native(program: GraphModule) -> GraphModule:
    """The program with torch's own integer kernels in the place of the reference form; the given one stays as it is.

    >>> import torchgraft
    >>> model = torchgraft.zoo.create("mlp").eval()
    >>> program = torchgraft.quantize.quantize(model, [torch.randn(8, 16)], backend="reference")
    >>> [node.name for node in to_native(program).graph.nodes]
    ['x', 'guard', 'quantize_tensor', 'linear_2', 'linear_3', 'output']
    """
    on_gpu = any(tensor.is_cuda for tensor in program.buffers())
    if not on_gpu and not torch.backends.mkldnn.is_available():
        raise QuantizeError(
            'this build of torch has no integer kernels (oneDNN)\nuse backend="reference", which runs everywhere'
        )
    if any(isinstance(module, Observer) for module in program.children()):
        raise QuantizeError(
            f"{type(program).__name__} is prepared, and has no integers yet\ncall convert() on it first"
        )
    result = with_own_graph(program)
    for node in views_nobody_writes(result):  # before there are layers of which nobody knows that they write nothing
        reshape_instead(node)
    with torch.no_grad():
        _Lowering(result).run()
    RemoveDeadCode().run(result)
    drop_unused(result)
    result.graph.lint()
    return result


class _Lowering(Reader):
    def __init__(self, program: GraphModule) -> None:
        self.program, self.graph = program, program.graph
        self.references = References(program)
        # Convolutions return other layouts than torch's own, which whatever is computed of them has, too.
        self.keeps_layout = has_written_views(program)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if not node._erased and is_layer(node, self.program):
                self._lower_layer(node)
        for node in list(self.graph.nodes):
            if not node._erased:
                self._keep_integers(node)
        for node in list(self.graph.nodes):
            if not node._erased:
                self._lower_the_rest(node)
        for node in list(self.graph.nodes):
            if operation(node, self.program) in PLAIN:
                self._write_in_place(node)
            elif node.op == "call_module":
                self._take_floats(node)
        drop_repeated_checks(self.program)

    # ---- layers ----

    def _lower_layer(self, node: Node) -> None:
        if node.op != "call_function":
            return
        arguments = bound(node, layer_arguments(node))
        weight = arguments["weight"]
        if not is_call(weight, dequantize_tensor) or arguments.get("input") is None:
            return
        source = arguments["input"]
        steps, scale, zero_point = [parameter_of(item, self.program) for item in weight.args[:3]]
        bias = parameter_of(arguments.get("bias"), self.program)
        axis, group = weight.kwargs.get("axis"), weight.kwargs.get("group")
        dtype = weight.kwargs.get("dtype", torch.float32)
        is_linear = layer_arguments(node)[-1] == "bias"
        if steps is None or scale is None or (arguments.get("bias") is not None and bias is None):
            return
        if not is_call(source, dequantize_tensor):
            if is_linear and dtype == torch.bfloat16 and (axis == 0 or group is not None):
                layer = self._weight_only(steps, scale, zero_point, bias, group)
                if layer is not None:
                    self._put(node, layer, (source,))
                    self._note_layer(weight.args[0].target, arguments.get("bias"), layer)
            return
        if not is_linear and self.keeps_layout:
            return
        convolution = None if is_linear else self._convolution(node, arguments, steps)
        if self._put_rows(node, source, (steps, scale, zero_point, bias), is_linear and axis == 0, dtype):
            return
        is_fit = axis in (0, None) and group is None and zero_point is None and steps.dtype == torch.int8
        is_plain = dtype in (torch.float32, torch.bfloat16)
        if not is_fit or not is_plain or (convolution is None and not is_linear):
            return
        if is_call(source.args[0], quantize_tensor) and self.is_dynamic(source):
            chosen = source.args[1].args[0]
            low, high = source.args[0].args[3:5]
            if source.args[0].args[5] == torch.uint8 and not chosen.kwargs:
                layer = DynamicLayer(steps, scale, bias, None, convolution, dtype=dtype, limits=(low, high))
                self._put(node, layer, (source.args[0].args[0],))
            return
        entering = self.steps(source)
        if entering is not None and self.is_byte(entering):
            self._fuse(node, entering, (steps, scale, bias), convolution, dtype)

    def _note_layer(self, steps: str, bias: Any, layer: torch.nn.Module) -> None:
        """Have weights that arrive later go straight into the layer."""
        plan = self.program.meta.get(KEY)
        if plan is None:  # a reference form that somebody wrote by hand
            return
        path = next(path for path, module in self.program.named_modules() if module is layer)
        stored = {
            name: place._replace(layer=path) if place.steps == steps else place for name, place in plan.stored.items()
        }
        moved = {bias.target: f"{path}.bias"} if isinstance(bias, Node) else {}
        self.program.meta[KEY] = dataclasses.replace(plan, stored=stored, moved={**plan.moved, **moved})

    def _put_rows(self, node: Node, source: Node, weights: tuple[Any, ...], is_fit: bool, dtype: torch.dtype) -> bool:
        """A linear layer whose inputs get a scale for each row."""
        if not is_fit or not self.is_dynamic(source) or not source.args[1].args[0].kwargs.get("per_row"):
            return False
        steps, scale, zero_point, bias = weights
        entering = source.args[0]
        if zero_point is not None or not is_call(entering, quantize_tensor) or entering.args[5] != steps.dtype:
            return False
        if (steps.dtype == torch.float8_e4m3fn) and not (steps.is_cuda and dtype == torch.bfloat16):
            return False
        self._put(node, RowLinear(steps, scale, bias, dtype), (entering.args[0],))
        return True

    def _fuse(
        self,
        node: Node,
        entering: Steps,
        weights: tuple[Any, Any, Any],
        convolution: Convolution | None,
        dtype: torch.dtype,
    ) -> None:
        """Put a layer in the place of a call and of as much after it as the kernel does, too."""
        last, other, post = self._after(node, 0 if convolution is None else len(convolution.stride))
        leaving = self._leaving(last)
        scales = (entering.scale, entering.zero_point)
        if other is not None and leaving is None:
            last, other, post = node, None, PostOperation()
            leaving = self._leaving(last)
        output = None if leaving is None else (leaving.scale, leaving.zero_point)
        options: dict[str, Any] = {"convolution": convolution, "post": post, "output": output, "dtype": dtype}
        inputs: tuple[Node, ...] = (entering.node,)
        if other is not None:
            may_write = self._is_last_use(other, node)
            options |= {"other_scale": (other[0].scale, other[0].zero_point), "may_write": may_write}
            layer: IntegerLayer = IntegerLayerWithSum(*weights, scales, **options)
            inputs = (entering.node, other[0].node)
        else:
            layer = IntegerLayer(*weights, scales, **options)
        end = last if leaving is None else leaving.node
        self._put(end, layer, inputs, name=node)

    def _after(self, node: Node, dimensions: int) -> tuple[Node, tuple[Steps, Node] | None, PostOperation]:
        """The last call that the kernel of a layer can do, the other side of a sum, and the activation."""
        last, other, post = node, None, PostOperation()
        user = only_user(last)
        if (
            user is not None
            and dimensions in (0, 2)
            and is_sum(user, self.program)
            and user.kwargs.get("alpha", 1) == 1
        ):
            second = user.args[1] if user.args[0] is last else user.args[0]
            found = self.steps(second) if isinstance(second, Node) and second is not last else None
            if found is not None and user.args[0] is second and writes_in_place(user):
                return last, None, post
            if found is not None and found.node < node:
                after = only_user(user)
                last, other = user, (found, second)
                if after is not None and operation(after, self.program) == "type_as":
                    last, after = after, only_user(after)
                if after is not None and operation(after, self.program) == "relu":
                    last, post = after, PostOperation("relu")
                return last, other, post
        if user is not None and operation(user, self.program) in ACTIVATIONS and first_input(user) is last:
            fused = post_operation(user, self.program, dimensions)
            if fused is not None:
                return user, None, fused
        return last, None, post

    def _is_last_use(self, other: tuple[Steps, Node], node: Node) -> bool:
        """Whether nothing looks at the bytes of a value after a layer has added them to its results."""
        steps, floats = other
        if steps.node.op == "placeholder" or (
            not is_call(steps.node, quantize_tensor) and steps.node.op != "call_module"
        ):
            return False
        later = [user for user in steps.node._users if user is not floats and not user < node]
        return not later and len(floats._users) == 1

    def _leaving(self, node: Node) -> Steps | None:
        """The one call that turns a result into bytes."""
        user = only_user(node)
        if user is None or not is_call(user, quantize_tensor) or user.args[5] != torch.uint8:
            return None
        if (user.args[3], user.args[4]) != (0, 255):
            return None
        return self.numbers(user, user.args[1], user.args[2])

    def _convolution(self, node: Node, arguments: dict[str, Any], weight: torch.Tensor) -> Convolution | None:
        if "output_padding" in layer_arguments(node):
            return None
        dimensions = weight.dim() - 2
        values = [arguments.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
        if any(isinstance(value, str) for value in values) or not isinstance(arguments.get("groups", 1), int):
            return None
        spread = [tuple(value) if isinstance(value, (list, tuple)) else (value,) for value in values]
        spread = [value * dimensions if len(value) == 1 else value for value in spread]
        if not all(isinstance(item, int) for value in spread for item in value):
            return None
        return Convolution(spread[0], spread[1], spread[2], arguments.get("groups", 1))

    def _weight_only(self, steps: Any, scale: Any, zero_point: Any, bias: Any, group: int | None) -> Any:
        if group is not None and (group not in (32, 64, 128, 256) or steps.shape[0] % 16):
            return None
        if group is None and (zero_point is not None or steps.dtype != torch.int8):
            return None
        return WeightOnlyLayer(steps, scale, zero_point, bias, group)

    # ---- between layers ----

    def _keep_integers(self, node: Node) -> None:
        """Where a call only moves or selects what was bytes before and is the same bytes after, do it on the bytes."""
        name = operation(node, self.program)
        if name not in MOVES and name not in SELECTS and name != "cat" and name not in ACTIVATIONS:
            return
        leaving = only_user(node)
        if leaving is None or not is_call(leaving, quantize_tensor):
            return
        after = self.numbers(leaving, leaving.args[1], leaving.args[2])
        sources = [item for item in node.all_input_nodes if is_call(item, dequantize_tensor)]
        if writes_in_place(node) and any(len(item._users) > 1 for item in sources):
            return  # the others are to see what it writes
        entering = [self.steps(item) for item in sources]
        if after is None or not sources or any(item is None for item in entering):
            return
        if name in ACTIVATIONS:
            if len(node.all_input_nodes) == 1 and entering[0] is not None:
                self._put_table(node, leaving, entering[0], after)
            return
        if name == "type_as":
            self._replace(leaving, entering[0].node if entering[0] and entering[0].key == after.key else None)
            return
        if any(item is None or item.key != after.key for item in entering) or not all_values(node, sources, name):
            return
        if name in SELECTS and not self._select_bytes(node):
            return
        for source, steps in zip(sources, entering, strict=True):
            assert steps is not None
            node.replace_input_with(source, steps.node)
        node.meta["drawn_as"] = "integer"
        if name == "view":
            node.target = "reshape" if node.op == "call_method" else torch.reshape
        self._replace(leaving, node)

    def _select_bytes(self, node: Node) -> bool:
        """Have a pooling work on bytes, where that can be done."""
        options = pool_options(node, self.program)
        source = first_input(node)
        if options is None or source is None:
            return False
        node.op, node.target = "call_function", max_pool_bytes
        node.meta["drawn_as"] = "integer"
        node._set_arguments((source, *options), {})
        return True

    def _put_table(self, node: Node, leaving: Node, entering: Steps, after: Steps) -> None:
        function = PLAIN.get(operation(node, self.program))
        options = options_of(node, self.program)
        if function is None or options is None or leaving.args[5] != torch.uint8 or not self.is_byte(entering):
            return
        low, high = leaving.args[3:5]
        values = table_of(lambda item: function(item, *options), entering.scale, entering.zero_point)
        table = quantize_fast(values, after.scale, after.zero_point, low, high)
        path = self.references.put_new(f"{node.name}_table", table, persistent=True)
        with self.graph.inserting_before(leaving):
            fetched = self.graph.get_attr(path)
            found = self.graph.call_function(look_up, (entering.node, fetched))
        inherit(found, node, "integer")
        self._replace(leaving, found)

    def _lower_the_rest(self, node: Node) -> None:
        if is_call(node, quantize_tensor) and len(node.args) == 6 and node.args[5] in (torch.uint8, torch.int8):
            found = self.numbers(node, node.args[1], node.args[2])
            if found is not None:
                self._lower_quantize(node, found)
        elif is_call(node, dequantize_tensor) and not node.kwargs:
            found = self.steps(node)
            if found is not None:
                self._average_bytes(node, found)
                dtype = node.args[3:]
                node.target = dequantize_fast
                node._set_arguments((found.node, found.scale, found.zero_point, *dtype), {})

    def _average_bytes(self, floats: Node, found: Steps) -> None:
        """Have means of whole dimensions add bytes, and not the floats that are made of them."""
        for node in list(floats._users):
            options = average_options(node, self.program)
            if options is not None and first_input(node) is floats:
                node.op, node.target = "call_function", average_bytes
                node._set_arguments((found.node, found.scale, found.zero_point, *options, *floats.args[3:]), {})
                node.meta["drawn_as"] = "integer"

    def _lower_quantize(self, node: Node, found: Steps) -> None:
        value, low, high, dtype = node.args[0], node.args[3], node.args[4], node.args[5]
        rest = () if (low, high, dtype) == (0, 255, torch.uint8) else (low, high, dtype)
        before = self._activation_of_own(value) if not rest else None
        if before is not None:
            source, function, options = before
            node.target = activate_and_quantize
            node._set_arguments((source, function, options, found.scale, found.zero_point), {})
            self.graph.erase_node(value)  # one that writes in place is no dead code, and would be applied twice
            return
        node.target = quantize_fast
        node._set_arguments((value, found.scale, found.zero_point, *rest), {})

    def _write_in_place(self, node: Node) -> None:
        found = self._activation_of_own(node, users=None)
        if found is not None:
            source, function, options = found
            node.op, node.target = "call_function", activate
            node._set_arguments((source, function, options), {})

    def _take_floats(self, node: Node) -> None:
        """Let a linear layer round its input itself, where nobody else wants it rounded."""
        layer, source = find_attribute(self.program, node.target)[0], first_input(node)
        if type(layer) is not IntegerLayer or layer.convolution is not None or layer.output is not None:
            return
        moved = None
        is_shape = source is not None and operation(source, self.program) in _SHAPES and not writes_in_place(source)
        if source is not None and is_shape and len(source._users) == 1:
            moved, source = source, first_input(source)  # of floats it is the same
        if layer.post.name not in ("none", "relu") or source is None:
            return
        self._forget_floats(source)
        if set(source._users) != {moved or node}:
            return
        if is_call(source, quantize_fast) and len(source.args) == 3:
            value = source.args[0]
        elif is_call(source, activate_and_quantize):
            with self.graph.inserting_before(source):
                value = self.graph.call_function(activate, source.args[:3])
            inherit(value, source)
        else:
            return
        if moved is not None:
            moved.replace_input_with(source, value)
            value = moved
        taking = IntegerLinear(
            layer.weight, layer.weight_scale, layer.bias, layer.input_scale, None, layer.post, None, layer.dtype
        )
        self.program.add_module(node.target, taking)
        node.args = (value,)
        self.graph.erase_node(source)

    def _forget_floats(self, steps: Node) -> None:
        """Erase what makes floats of bytes that nobody takes any more."""
        for floats in [user for user in steps._users if is_call(user, dequantize_fast) and not user._users]:
            self.graph.erase_node(floats)

    def _activation_of_own(self, node: Any, users: int | None = 1) -> tuple[Node, str, tuple[Any, ...]] | None:
        """An activation of what a layer just wrote for it alone, so that it may write there, too."""
        name = operation(node, self.program) if isinstance(node, Node) else ""
        if name not in WRITING or (users is not None and len(node._users) != users):
            return None
        source, options = first_input(node), options_of(node, self.program)
        if source is None or options is None or source.op != "call_module" or len(source._users) != 1:
            return None
        if not isinstance(find_attribute(self.program, source.target)[0], IntegerLayer):
            return None
        return source, name, options

    # ---- reading and editing ----

    def _put(self, end: Node, layer: torch.nn.Module, inputs: tuple[Node, ...], name: Node | None = None) -> None:
        """Let a layer stand for a call, or for several of which `end` is the last."""
        first = end if name is None else name
        between = chain(first, end)
        path = self.references.free_name(f"{first.name}_layer") if hasattr(self.program, first.name) else first.name
        self.program.add_module(path, layer)
        with self.graph.inserting_before(first):
            call = self.graph.call_module(path, inputs)
        inherit(call, first, "integer")
        for node in between:
            for user in list(node._users):
                if is_shape_read(user):
                    user.replace_input_with(node, call)
        end.replace_all_uses_with(call)
        self._erase(end)

    def _replace(self, node: Node, value: Node | None) -> None:
        if value is not None:
            node.replace_all_uses_with(value)
            self._erase(node)

    def _erase(self, node: Node) -> None:
        """Erase a call and what was computed for it alone."""
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        for source in inputs:
            if not source._users and source.op not in ("placeholder", "output") and not source._erased:
                self._erase(source)
