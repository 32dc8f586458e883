"""`simulate`: runs a program on tensors without data, takes down what it gives a machine to do, and says how long that takes.
What is computed from each operator is in `kernels.py`, `timing.py` and `clocks.py`; the answer is in `report.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import torch

from torchgraft.analysis.cost.count import distinct_bytes
from torchgraft.analysis.dry_run import DryRun, computing_if_needed, has_values, program_of
from torchgraft.analysis.memory.peak import GPU_GRAIN, Accounts, MakeOptimizer
from torchgraft.analysis.simulate.clocks import Ran, Step, run_clocks
from torchgraft.analysis.simulate.composites import kernels_of
from torchgraft.analysis.simulate.kernels import DTYPES, TYPES, Kernel
from torchgraft.analysis.simulate.lowered import lowered_steps
from torchgraft.analysis.simulate.machine import Machine
from torchgraft.analysis.simulate.pages import fresh_bytes
from torchgraft.analysis.simulate.report import SimulatedNode, Simulation, bound_of, simulated_kernels
from torchgraft.analysis.simulate.timing_on_cpu import scratch_pieces
from torchgraft.analysis.simulate.whole_calls import WholeCalls
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.printing import target_text
from torchgraft.ir.structures import in_dtype

if TYPE_CHECKING:
    from torchgraft.analysis.simulate.parallel import ParallelSimulation

MODES = ("eager", "graph", "lowered")


@overload
def simulate(
    program: Any,
    args: Any = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    machine: str | PathLike[str] | Machine = ...,
    precision: str | None = ...,
    mode: str = ...,
    training: bool = ...,
    optimizer: MakeOptimizer | None = ...,
) -> Simulation: ...
@overload
def simulate(
    program: Any,
    args: Any = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    machines: Sequence[str | PathLike[str] | Machine],
    precision: str | None = ...,
    mode: str = ...,
    training: bool = ...,
    optimizer: MakeOptimizer | None = ...,
    **parallel: Any,
) -> ParallelSimulation: ...
def simulate(
    program: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    machine: str | PathLike[str] | Machine = "h200",
    machines: Sequence[str | PathLike[str] | Machine] | None = None,
    precision: str | None = None,
    mode: str = "eager",
    training: bool = False,
    optimizer: MakeOptimizer | None = None,
    **parallel: Any,
) -> Simulation | ParallelSimulation:
    """How long a run of a program takes on a machine that need not be here, and how much memory. Nothing is computed, but where
    shapes depend on values: then the example is run once, here.

    `machine` is the name of one that comes with torchgraft (`machine_names()`), the path of a TOML file or a `Machine`.
    `precision` ("fp32", "tf32", "bf16", "fp16") is what parameters and inputs of floating point are taken to be; without it
    they are what they are, and "tf32" is fp32 with the faster products. `mode` is "eager" (wall time, the host included),
    "graph" (the device alone, as a replayed CUDA graph) or "lowered" (the same with norms folded and element-wise chains made
    one, in the memory of the program as it is). With `training`, or an `optimizer` made from the parameters, it is a step of
    forward, backward and update. With `machines`, one for each stage, it is a step on several devices, and takes what
    `simulate_parallel` takes: `links`, `schedule`, `microbatches`, `replicas` and the rest.

    >>> import torch, torchgraft
    >>> result = simulate(torch.nn.Linear(4096, 4096), torch.empty(512, 4096, device="meta"), precision="fp16", mode="graph")
    >>> result.kernels[0].bound, result.precision, 1e-5 < result.seconds < 1e-4
    ('compute', 'fp16', True)
    """
    if machines is not None:
        if machine != "h200":
            raise GraftError(
                f"there is a machine=, {machine!r}, and machines=\ngive machines= alone: one for each stage"
            )
        from torchgraft.analysis.simulate.parallel import simulate_parallel

        options = {"precision": precision, "mode": mode, "training": training, "optimizer": optimizer, **parallel}
        return simulate_parallel(program, args, kwargs, machines=machines, **options)
    if parallel:
        raise GraftError(
            f"{next(iter(parallel))}= is about several devices\ngive machines=, a list with one for each stage, too"
        )
    if isinstance(machine, (list, tuple)):
        raise GraftError(
            "machine= is one machine, not several\n"
            "use what_if(..., machine=[...]) to compare some, or machines=[...] to run on several at once"
        )
    chosen = Machine.named(machine)
    known_mode(mode)
    values, keywords = example_inputs(args, kwargs)
    is_training = training or optimizer is not None
    recorder = recorded(program, values, keywords, chosen, precision, is_training, optimizer)
    return recorder.simulation(mode, is_training)


def known_mode(mode: str) -> str:
    """A mode, which must be one."""
    if mode not in MODES:
        raise GraftError(f"there is no mode {mode!r}\nchoose one of {', '.join(MODES)}")
    return mode


def recorded(
    program: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    machine: Machine,
    precision: str | None,
    training: bool,
    optimizer: MakeOptimizer | None = None,
    node_done: Callable[[Node, Any], None] | None = None,
    edit: Callable[[GraphModule], GraphModule] | None = None,
) -> Recorder:
    """A program or a model, run on tensors without data, with all that it gives a machine to do taken down. Where sizes depend on
    values it is run on copies of the real tensors.

    `edit` gives another program for the one that is captured, and `node_done` is told the value of each node.
    """
    if optimizer is not None and not callable(optimizer):
        raise GraftError(
            f"optimizer is {optimizer!r}, and has to make one of parameters\n"
            "give a class such as torch.optim.AdamW, or lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    dtype = dtype_of(precision, machine)
    # On the meta device torch takes attention apart; a program that was captured there names that device itself.
    place = None if isinstance(program, GraphModule) else torch.device("cpu")

    def run(compute: bool) -> Recorder:
        subject, values, keywords = program, args, kwargs
        if compute and dtype is not None:
            subject = copy.deepcopy(program).to(dtype) if isinstance(program, torch.nn.Module) else program
            values, keywords = in_dtype(args, dtype), in_dtype(kwargs, dtype)
        subject = program_of(subject, values, keywords, compute, dtype=dtype, device=place)
        if edit is not None:
            subject = edit(subject)
        dry_run = DryRun(subject, values, keywords, node_done, compute, dtype, place)
        recorder = Recorder(dry_run, machine, precision)
        if training:
            recorder.train(optimizer)
        else:
            recorder.forward()
        return recorder

    with torch.set_grad_enabled(training):
        if has_values(program, args, kwargs):
            return computing_if_needed(run)
        try:
            return run(False)
        except GraftError as error:
            advice = "give a model and inputs that are not on the meta device, and the example is run"
            raise GraftError(str(error).replace("give compute=True to run on real tensors", advice)) from error


def dtype_of(precision: str | None, machine: Machine) -> torch.dtype | None:
    """The type of floating point of a precision, which the machine must have."""
    if precision is None:
        return None
    if precision not in DTYPES:
        raise GraftError(f"there is no precision {precision!r}\nchoose one of {', '.join(DTYPES)}")
    if precision not in machine.precisions:
        raise GraftError(
            f"{machine.name} has no {precision}\nit has {', '.join(machine.precisions)}; choose one of these, or another machine"
        )
    return DTYPES[precision]


class Recorder(Accounts):
    """A dry run that takes down every operator as work for a machine, besides the memory that it takes."""

    def __init__(self, run: DryRun, machine: Machine, precision: str | None) -> None:
        self.machine, self.precision, self.gpu = machine, precision, machine.kind == "gpu"
        self.steps: list[Step] = []
        self._calls = ModuleCalls()
        self._called: Node | None = None
        super().__init__(run, measure=lambda call: 0, grain=GPU_GRAIN if self.gpu else 1)

    def forward(self) -> None:
        with WholeCalls(self._whole_call, self.precision == "tf32") if self.gpu else contextlib.nullcontext():
            super().forward()

    def train(self, make_optimizer: MakeOptimizer | None) -> None:
        super().train(None if make_optimizer is None else self.made_optimizer(make_optimizer))

    def made_optimizer(self, make_optimizer: MakeOptimizer) -> MakeOptimizer:
        """The same, and on a GPU for all parameters at once, as torch does there where nothing else is asked for."""

        def make(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = make_optimizer(parameters)
            for group in optimizer.param_groups:
                if self.gpu and group.get("foreach", 0) is None and not group.get("fused"):
                    group["foreach"] = True
            return optimizer

        return make

    def _operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        super()._operator(func, args, kwargs, result)
        kernels = kernels_of(func, args, kwargs, result, self.precision == "tf32", self.gpu)
        if self.storages.phase == "optimizer" and [kernel.kind for kernel in kernels] == ["wait"]:
            kernels = []  # what an optimizer reads is the number of its step, which is on the host
        self._add(str(func), kernels, _leaves((args, kwargs)), _leaves(result))

    def _whole_call(self, name: str, read: list[torch.Tensor], made: list[torch.Tensor], kernels: list[Kernel]) -> None:
        self.storages.step(made, self.run.place.node)
        self._add(name, kernels, read, made)

    def _add(self, operator: str, kernels: list[Kernel], read: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        node = self.run.place.node
        name, phase = None if node is None else node.name, self.storages.phase
        calls = self._calls.made_for(node) if node is not None and phase == "forward" else 0
        inner = node is not None and node is self._called and phase == "forward"  # Python calls one operator for a node
        self._called = node
        if self.gpu and made and not any(tensor.numel() for tensor in made):
            kernels = []  # torch launches nothing where there is nothing to compute
        if not kernels:
            self.steps.append(Step(operator, None, (), name, phase, calls, self.storages.time, inner))
        for kernel in kernels:
            touched = self._touched(read, made, kernel.kind)
            self.steps.append(Step(operator, kernel, touched, name, phase, calls, self.storages.time, inner))
            operator, calls = "", 0

    def _touched(
        self, read: list[torch.Tensor], made: list[torch.Tensor], kind: str
    ) -> tuple[tuple[int, int, bool], ...]:
        """The memory that a call goes through: which, how many bytes, and whether it is new."""
        # Of what rows are fetched from, as much counts as is fetched.
        most = sum(map(distinct_bytes, made)) if kind == "gather" else None
        seen = set(map(id, read))
        found = []
        for tensor in read:
            size = distinct_bytes(tensor)
            found.append((self._memory_of(tensor), size if most is None else min(size, most), False))
        found += [(self._memory_of(tensor), distinct_bytes(tensor), True) for tensor in made if id(tensor) not in seen]
        return tuple(found)

    def _memory_of(self, tensor: torch.Tensor) -> int:
        entry = self.storages.entry_of(tensor)
        return id(tensor.untyped_storage()) if entry is None else id(entry)

    def last_steps(self) -> list[Step]:
        """What was taken down since the last step began."""
        return [step for step in self.steps if step.moment > self.started]

    def fresh_bytes(self) -> dict[int, int]:
        """The new memory that comes from the system, by moment; a GPU's allocator keeps what it once had."""
        if self.gpu or not self.machine.fresh_bandwidth:
            return {}
        log = [entry for entry in self.storages.log if entry.born > self.started]
        kernels = [(step.moment, step.kernel) for step in self.last_steps() if step.kernel is not None]
        scratch = {moment: scratch_pieces(kernel, self.machine) for moment, kernel in kernels}
        return fresh_bytes(log, self.machine.mapped_bytes, scratch)

    def workspace_bytes(self) -> int:
        """What torch keeps for products on a GPU, from the first of them on."""
        kernels = (step.kernel for step in self.last_steps())
        has_products = any(kernel is not None and kernel.kind == "matmul" for kernel in kernels)
        return self.machine.workspace_bytes if self.gpu and has_products else 0

    def steps_of(self, mode: str) -> list[Step]:
        """The steps of the last run in a mode: compiled, where that is asked for."""
        return lowered_steps(self.last_steps()) if mode == "lowered" else self.last_steps()

    def simulation(self, mode: str, training: bool) -> Simulation:
        """The answer, from what was taken down since the last step began."""
        ran = run_clocks(self.steps_of(mode), self.machine, mode, self.fresh_bytes())
        memory = self.result()
        live = [*[0] * (self.started + 1), *[moment.live for moment in memory.timeline]]
        kernels = simulated_kernels(ran, live)
        seconds = max((max(entry.end, entry.issued) for entry in ran), default=0.0)
        busy = sum(kernel.seconds for kernel in kernels)
        workspace = self.workspace_bytes()
        watts, idle = self.machine.watts, self.machine.idle_watts or 0.0
        shares: dict[str, float] = defaultdict(float)
        for kernel in kernels:
            if kernel.kind == "unknown":
                shares[kernel.operator] += kernel.seconds / (busy or 1.0)
        return Simulation(
            name=type(self.program).__name__,
            machine=self.machine,
            precision=self.precision or self._precision(),
            mode=mode,
            training=training,
            seconds=seconds,
            device_seconds=busy,
            host_seconds=sum(entry.host for entry in ran),
            peak_bytes=memory.peak + workspace,
            joules=None if watts is None else busy * watts + (seconds - busy) * idle,
            nodes=self._nodes(ran),
            kernels=kernels,
            unknown=dict(shares),
            memory=memory,
            workspace_bytes=workspace,
        )

    def _precision(self) -> str:
        tensors = [*self.run.module.parameters(), *_leaves(self.run.inputs)]
        first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        return "fp32" if first is None else TYPES.get(first.dtype, str(first.dtype))

    def _nodes(self, ran: list[Ran]) -> tuple[SimulatedNode, ...]:
        own: dict[str | None, list[Ran]] = defaultdict(list)
        shares: dict[str | None, float] = defaultdict(float)
        now = 0.0
        for entry in ran:
            own[entry.step.node].append(entry)
            shares[entry.step.node] += max(entry.end - now, 0.0)
            now = max(now, entry.end)
        found = []
        for node in self.program.graph.nodes:
            these = own.pop(node.name, [])
            is_call = node._op.startswith("call") and not is_guard(node._target)
            if these or is_call:
                found.append(_simulated_node(node.name, node, these, shares[node.name]))
        for name, these in own.items():  # the optimizer, and what autograd does between nodes
            found.append(_simulated_node(name or "(between nodes)", None, these, shares[name]))
        return tuple(found)


def _simulated_node(name: str, node: Node | None, ran: list[Ran], seconds: float) -> SimulatedNode:
    kernels = [entry.step.kernel for entry in ran if entry.step.kernel is not None]
    stack = [] if node is None else list((node.meta.get("nn_module_stack") or {}).values())
    return SimulatedNode(
        name=name,
        op="" if node is None else node.op,
        target="" if node is None else target_text(node.target),
        module=str(stack[-1][0]) if stack else "",
        start=min((entry.start for entry in ran), default=0.0),
        seconds=seconds,
        device_seconds=sum(entry.timing.seconds for entry in ran if entry.timing is not None),
        host_seconds=sum(entry.host for entry in ran),
        bound=bound_of(ran, seconds),
        kernels=len(kernels),
        flops=sum(kernel.flops for kernel in kernels),
        bytes=sum(kernel.bytes for kernel in kernels),
    )


class ModuleCalls:
    """How many modules Python called to come from one node to the next."""

    def __init__(self) -> None:
        self._before: tuple[str, ...] = ()
        self._node: Node | None = None

    def made_for(self, node: Node) -> int:
        """The calls since this was asked last; none where it is the same node."""
        if node is self._node:
            return 0
        self._node = node
        stack = tuple(str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values())
        if node._op == "call_module":
            stack = (*stack, str(node._target)) if str(node._target) not in stack else stack
        entered = [path for path in stack if path not in self._before]
        self._before = stack
        return len(entered)


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
