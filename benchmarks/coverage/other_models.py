"""The models of transformers that are no causal language models, with random weights at small configurations: encoders, encoders
with decoders, pictures, sounds, series and all mixtures. What they are fed is found in `feeding`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.cases import Case, Inputs
from benchmarks.coverage.feeding import Feeder
from benchmarks.coverage.shrinking import attempts
from benchmarks.coverage.torchvision_models import import_torchvision

MOST_PARAMETERS = 60_000_000


def cases() -> Iterator[Case]:
    """One case for every kind of configuration that has a model, and none that predicts the next word."""
    import_torchvision()
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for kind, names in modeling_auto.MODEL_MAPPING_NAMES.items():
        if kind not in causal:
            yield _case("transformers-other", kind, kind, names if isinstance(names, str) else names[0])


def head_cases() -> Iterator[Case]:
    """The models with something to predict: one case for every class of the tables but the causal language models."""
    import_torchvision()
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    seen = {*modeling_auto.MODEL_MAPPING_NAMES.values(), *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    for table, entries in vars(modeling_auto).items():
        if not table.endswith("_MAPPING_NAMES") or table == "CONFIG_MAPPING_NAMES":
            continue
        for kind, names in entries.items():
            for name in (names,) if isinstance(names, str) else names:
                if name not in seen:
                    seen.add(name)
                    yield _case("transformers-heads", f"{kind}: {name}", kind, name)


def _case(collection: str, name: str, kind: str, cls: str) -> Case:
    subject = Subject(kind, cls)
    others = {
        "values": lambda: subject.inputs(3),
        "batch": lambda: subject.inputs(5),
        "size": lambda: subject.inputs(3, other_size=True),
    }
    return Case(collection, name, subject.build, lambda: subject.inputs(3), others)


class Subject:
    """One architecture: building the model finds out what it can be fed."""

    def __init__(self, kind: str, cls: str) -> None:
        self.kind, self.cls = kind, cls
        self.feeder: Feeder | None = None

    def build(self) -> nn.Module:
        problems: list[Exception] = []
        for make in attempts(self.kind):
            try:
                model = self._model(make())
                self.feeder = Feeder(model)
                subject = copy.deepcopy(model)
                run = lambda inputs, subject=subject: subject(*inputs.args, **inputs.kwargs)  # noqa: E731
                with torch.no_grad():
                    self.feeder.search(run)
                    self.feeder.add_labels(run)
                return model
            except Exception as error:
                problems.append(error)
        raise problems[0]

    def inputs(self, batch: int, other_size: bool = False) -> Inputs:
        assert self.feeder is not None
        return self.feeder.inputs(batch, other_size)

    def _model(self, configuration: Any) -> nn.Module:
        import transformers

        cls = getattr(transformers, self.cls)
        with torch.device("meta"):
            size = sum(value.numel() for value in cls(copy.deepcopy(configuration)).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"the configuration still has {size:,} parameters")
        torch.manual_seed(0)
        return cls(configuration).eval()
