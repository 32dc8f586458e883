"""`simulate_parallel`: a program in stages on several machines, in copies on more of them, and how long a step of all takes.
The parts of it are in the files beside: the chain of units, cuts, schedules, links; the answer is in `report.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from torchgraft.analysis.memory.peak import MakeOptimizer
from torchgraft.analysis.simulate.machine import Machine
from torchgraft.analysis.simulate.parallel.chain import Chain, Stage, Times, stage_of
from torchgraft.analysis.simulate.parallel.cuts import StageLimit, best_cuts
from torchgraft.analysis.simulate.parallel.links import BUCKET_BYTES, AnyLink, Bucket, Link, link_of, reduced_buckets
from torchgraft.analysis.simulate.parallel.report import ParallelSimulation, SimulatedDevice
from torchgraft.analysis.simulate.parallel.schedules import (
    Done,
    Task,
    most_bytes,
    most_in_flight,
    orders_of,
    run_schedule,
)
from torchgraft.analysis.simulate.simulate import known_mode
from torchgraft.codegen.calling import batch_of, example_inputs, of_batch
from torchgraft.errors import GraftError
from torchgraft.results.progress import stage as said
from torchgraft.results.tables import count

AnyMachine = str | PathLike[str] | Machine


@dataclass(frozen=True)
class Plan:
    """How a program is spread over devices; what is not about the program itself."""

    machines: tuple[Machine, ...]
    links: tuple[Link, ...]
    schedule: str
    microbatches: int
    chunks: int
    replicas: int
    replica_link: Link
    all_reduce: str
    bucket_bytes: int
    recompute: bool
    shard_optimizer: bool
    mode: str
    training: bool

    @property
    def stages(self) -> int:
        """All of them, `chunks` on each device."""
        return len(self.machines) * self.chunks

    def machine_of(self, stage: int) -> Machine:
        """Stages go round the devices."""
        return self.machines[stage % len(self.machines)]

    def transfer(self, source: int, target: int, size: float) -> float:
        """Seconds from one stage to a neighbour."""
        devices = len(self.machines)
        one, other = source % devices, target % devices
        return 0.0 if one == other else self.links[min(one, other) if abs(one - other) == 1 else -1].transfer(size)


def simulate_parallel(
    program: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    machines: Sequence[AnyMachine],
    links: AnyLink | Sequence[AnyLink] | None = None,
    schedule: str = "1f1b",
    microbatches: int = 1,
    chunks: int = 1,
    cuts: Sequence[str] | None = None,
    replicas: int = 1,
    replica_link: AnyLink | None = None,
    all_reduce: str = "best",
    bucket_bytes: int = BUCKET_BYTES,
    recompute: bool = False,
    shard_optimizer: bool = False,
    precision: str | None = None,
    mode: str = "eager",
    training: bool = False,
    optimizer: MakeOptimizer | None = None,
) -> ParallelSimulation:
    """How long a step takes with the program in stages on several machines, and how much memory each of them needs.

    A `Split` has its parts as stages. Anything else is cut where the slowest stage is quickest and all fit into memory, or before
    the calls named in `cuts`. `machines` has one for each stage, or for each `chunks` stages with the schedule "interleaved".
    `args` are the inputs of one copy, divided into `microbatches`. `replicas` copies share their gradients by all-reduces that
    overlap with backward, in buckets. `links` joins the stages and `replica_link` the copies: a `Link`, a name of the machine's
    file or of torchgraft's table, or bytes a second; without them, the machine's fastest, and its network for more than eight
    devices.
    With `recompute` a stage keeps its inputs alone and runs forward again before backward; with `shard_optimizer`
    copies divide the state of the optimizer among them.

    >>> import torch, torchgraft
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    >>> x = torch.empty(64, 1024, device="meta")
    >>> found = simulate_parallel(model, x, machines=["h200"] * 4, microbatches=8, training=True)
    >>> len(found.devices), 0 < found.bubble < 1, [device.in_flight for device in found.devices]
    (4, True, [4, 3, 2, 1])
    """
    values, keywords = example_inputs(args, kwargs)
    is_training = training or optimizer is not None
    known_mode(mode)
    chosen = _machines(machines)
    _check_numbers(microbatches=microbatches, chunks=chunks, replicas=replicas, bucket_bytes=bucket_bytes)
    between, devices = _links(links, chosen), len(chosen) * replicas
    copies = link_of(replica_link, chosen[0], devices) if replicas > 1 else Link("none", 1.0, 0.0)
    copies.all_reduce(1.0, 2, all_reduce)  # a name that is wrong is said before the work
    plan = Plan(
        *(chosen, between, schedule, microbatches, chunks, replicas, copies, all_reduce, bucket_bytes),
        *(recompute, shard_optimizer, mode, is_training),
    )
    orders = orders_of(schedule, len(plan.machines), microbatches, chunks, is_training)
    batch = batch_of(values, keywords)
    given, named = _microbatch(values, keywords, batch, microbatches)
    parts = getattr(program, "parts", None)
    subject = program if parts is None else program.module
    with said("running the program without data"):
        chain = Chain(subject, given, named, plan.machines[0], precision, is_training, optimizer)
    with said("cutting it into stages"):
        times = _times(chain, plan)
        if parts is not None:
            starts = _starts_of_parts(chain, [part.name for part in parts], plan)
        else:
            starts = (
                _named_starts(chain, cuts, plan) if cuts is not None else _searched_starts(chain, plan, times, orders)
            )
    stages = _stages(chain, plan, times, starts)
    name = type(subject).__name__
    return _result(name, chain, plan, stages, orders, (batch or 1) * replicas)


# ---- what was asked for ----


def _machines(given: Sequence[AnyMachine]) -> tuple[Machine, ...]:
    if isinstance(given, (str, PathLike, Machine)) or not given:
        raise GraftError(
            f"machines is a list with one machine for each device, not {given!r}\nfor example ['h200'] * 4"
        )
    known: dict[str, Machine] = {}
    return tuple(
        item if isinstance(item, Machine) else known.setdefault(str(item), Machine.named(item)) for item in given
    )


def _check_numbers(**given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise GraftError(f"{name} is {value!r}\ngive a whole number, 1 or more")


def _links(given: AnyLink | Sequence[AnyLink] | None, machines: Sequence[Machine]) -> tuple[Link, ...]:
    """The links from each machine to the next one."""
    wanted = max(len(machines) - 1, 1)
    several: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given] * wanted
    if len(several) != wanted:
        raise GraftError(
            f"{count(len(several), 'link')} cannot join {len(machines)} machines in a row\ngive one, or {wanted}"
        )
    pairs = zip(several, machines[:-1], strict=False)
    return tuple(link_of(link, machine, len(machines)) for link, machine in pairs)


def _microbatch(args: Any, kwargs: Any, batch: int | None, microbatches: int) -> Any:
    if microbatches == 1:
        return args, kwargs
    if batch is None or batch % microbatches:
        what = "no batch" if batch is None else f"a batch of {batch}"
        raise GraftError(
            f"{what} cannot be divided into {microbatches} micro-batches\ngive a batch that is a multiple of them"
        )
    return of_batch(args, kwargs, batch // microbatches)


def _times(chain: Chain, plan: Plan) -> list[Times]:
    """The times of all units on the machine of each stage."""
    different = {id(machine): machine for machine in plan.machines}
    found = {key: chain.times(machine, plan.mode) for key, machine in different.items()}
    return [found[id(plan.machine_of(stage))] for stage in range(plan.stages)]


# ---- stages ----


def _starts_of_parts(chain: Chain, parts: list[str], plan: Plan) -> list[int]:
    if len(parts) != plan.stages:
        raise GraftError(
            f"the split has {len(parts)} parts, and there are {plan.stages} stages\ngive a machine for each part"
        )
    targets = {str(node._target): place for place, node in enumerate(chain.calls) if node._op == "call_module"}
    return [0, *[targets[name] for name in parts[1:]]]


def _named_starts(chain: Chain, cuts: Sequence[str], plan: Plan) -> list[int]:
    names = [unit.name for unit in chain.units]
    for name in cuts:
        if str(name) not in names:
            raise GraftError(
                f"there is no call named '{name}' to cut before\nthe program has {', '.join(names[:5])}, …"
            )
    starts = [0, *[names.index(str(name)) for name in cuts]]
    if starts != sorted(set(starts)) or len(starts) != plan.stages:
        raise GraftError(
            f"{len(cuts)} cuts do not make {plan.stages} stages\ngive {plan.stages - 1} calls after the first, in their order"
        )
    return starts


def _searched_starts(chain: Chain, plan: Plan, times: Sequence[Times], orders: Any) -> list[int]:
    equal = run_schedule(orders, lambda task: 1.0, lambda source, target: 0.0)
    in_flight = most_in_flight(equal, plan.stages)
    limits = [
        StageLimit(
            times=times[stage],
            memory=(plan.machine_of(stage).memory_bytes - chain.run.workspace_bytes()) / plan.chunks,
            in_flight=in_flight[stage],
            bytes_per_weight=(1.0 + _state_share(chain, plan)) if plan.training else 0.0,
            recompute=plan.recompute,
        )
        for stage in range(plan.stages)
    ]
    found = best_cuts(chain, limits)
    if found is None:  # nothing fits: the quickest cut shows by how much
        found = best_cuts(chain, [replace(limit, memory=float("inf")) for limit in limits])
    assert found is not None
    return found


def _state_share(chain: Chain, plan: Plan) -> float:
    """Bytes of an optimizer's state for each byte of what is trained."""
    trained = sum({w.identity: w.size for unit in chain.units for w in unit.weights if w.trained}.values())
    return chain.state_bytes / (trained or 1) / (plan.replicas if plan.shard_optimizer else 1)


def _stages(chain: Chain, plan: Plan, times: Sequence[Times], starts: Sequence[int]) -> list[Stage]:
    """The stages, with what a plan adds to their times: forward once more, gradients added up over micro-batches."""
    found = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(chain.units)], strict=True)):
        stage = stage_of(chain, times[number], start, end)
        extra = stage.forward if plan.recompute and plan.training else 0.0
        if plan.training and plan.microbatches > 1:
            extra += 3 * stage.gradient_bytes / plan.machine_of(number).bandwidth
        optimizer = stage.optimizer / (plan.replicas if plan.shard_optimizer else 1)
        found.append(replace(stage, backward=stage.backward + extra, optimizer=optimizer))
    return found


# ---- the step ----


def _result(
    name: str, chain: Chain, plan: Plan, stages: list[Stage], orders: Sequence[Sequence[Task]], batch: int
) -> ParallelSimulation:
    def seconds(task: Task) -> float:
        stage = stages[task.stage]
        return stage.backward if task.backward else stage.forward

    def transfer(source: int, target: int) -> float:
        forward = target > source
        return plan.transfer(source, target, stages[target].sent if forward else stages[source].returned)

    done = run_schedule(orders, seconds, transfer)
    makespan = max(entry.end for entry in done)
    devices, buckets, step = [], [], 0.0
    flights = most_in_flight(done, plan.stages)
    for number, machine in enumerate(plan.machines):
        own = [entry for entry in done if entry.device == number]
        mine = list(range(number, plan.stages, len(plan.machines)))
        reduced = _reduced(plan, stages, own) if plan.replicas > 1 and plan.training else []
        computed = max(entry.end for entry in own)
        ready = max([computed, *[bucket.end for bucket in reduced]])
        end = ready + sum(stages[stage].optimizer for stage in mine)
        step = max(step, end)
        buckets.append(tuple(reduced))
        busy = sum(entry.end - entry.start for entry in own)
        devices.append(
            SimulatedDevice(
                number=number,
                machine=machine.name,
                stages=tuple(stages[stage].module or stages[stage].first for stage in mine),
                busy_seconds=busy,
                bubble=1 - busy / makespan if makespan else 0.0,
                reduce_seconds=sum(bucket.end - bucket.start for bucket in reduced),
                exposed_seconds=ready - computed,
                optimizer_seconds=end - ready,
                weight_bytes=sum(stages[stage].weight_bytes for stage in mine),
                peak_bytes=_peak(chain, plan, stages, mine, own),
                memory_bytes=machine.memory_bytes,
                in_flight=max(flights[stage] for stage in mine),
            )
        )
    whole = makespan * len(devices)
    peak = sum(machine.peak.get(chain.precision, machine.peak.get("fp32", 0.0)) for machine in plan.machines)
    return ParallelSimulation(
        name=name,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
        replicas=plan.replicas,
        links=tuple(dict.fromkeys(link.name for link in plan.links)),
        replica_link=plan.replica_link.name if plan.replicas > 1 else "",
        precision=chain.precision,
        mode=plan.mode,
        training=plan.training,
        batch=batch,
        seconds=step,
        pipeline_seconds=makespan,
        bubble=1 - sum(device.busy_seconds for device in devices) / whole if whole else 0.0,
        utilization=chain.flops * plan.microbatches / (step * peak) if step and peak else None,
        devices=tuple(devices),
        cuts=tuple(stage.first for stage in stages[1:]),
        tasks=tuple(done),
        buckets=tuple(buckets),
    )


def _reduced(plan: Plan, stages: Sequence[Stage], own: Sequence[Done]) -> list[Bucket]:
    """The all-reduces of one device: gradients are ready while the last micro-batch goes backward through a stage."""
    ready: list[tuple[float, int]] = []
    last = {entry.task.stage: entry for entry in own if entry.task.backward}
    for stage, entry in last.items():
        gradients = stages[stage].gradients
        # Of a task's time backward itself comes last, after what a plan put before it.
        begin = entry.end - (gradients[-1][0] if gradients else 0.0)
        ready += [(begin + seconds, size) for seconds, size in gradients]
    return reduced_buckets(sorted(ready), plan.replica_link, plan.replicas, plan.bucket_bytes, plan.all_reduce)


def _peak(chain: Chain, plan: Plan, stages: Sequence[Stage], mine: Sequence[int], own: Sequence[Done]) -> int:
    """Weights, gradients and the optimizer's state of a device, what micro-batches under way hold, and what comes and goes."""
    lasting = sum(stages[stage].weight_bytes + stages[stage].gradient_bytes for stage in mine)
    state = sum(stages[stage].gradient_bytes for stage in mine) * _state_share(chain, plan)
    recompute = plan.recompute and plan.training
    held = [stage.sent + (0 if recompute else stage.saved) for stage in stages]
    working = max(stages[stage].working + (stages[stage].saved if recompute else 0) for stage in mine)
    return int(lasting + state + most_bytes(own, held) + working) + chain.run.workspace_bytes()
