"""Traps: writes in place into inputs, views, aliases and constants, by every spelling.
Buffers and other things that live on the model are in `state.py`.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection()


def _two(n: int = 3) -> Any:
    return torch.randn(n, 4), torch.randn(n, 4)


@TRAPS.function("an input written")
def input_written(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


@TRAPS.function("an input written, nothing returned")
def only_written(x: torch.Tensor) -> None:
    x.add_(1)
    x[0:1].zero_()


@TRAPS.function("views written")
def views_written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 0].add_(10)
    y.t()[1].mul_(2)
    y.view(-1)[::2] -= 1
    return y


@TRAPS.function("an alias written")
def alias_written(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    z = y
    z += 1
    w = y.view(-1)
    w *= 2
    return y


@TRAPS.function("a detached alias written")
def detached_written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.detach().add_(1)
    y.data.mul_(2)
    return y * 1


@TRAPS.function("items set")
def items_set(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=x.dtype)
    y[:, 1] = x[:, 0]
    y[..., -1] = 5
    y[0:1, 2:] = x[0:1, :2]
    return y


@TRAPS.function("items set by masks and indices", sizes=(5, 2))
def items_set_by_masks(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[y > 0] = 0
    y[torch.tensor([0, 1]), torch.tensor([1, 2])] = 7
    y[x < -1] *= 2
    return y


@TRAPS.function("an input's items set")
def input_items_set(x: torch.Tensor) -> torch.Tensor:
    x[:, 0] = 0
    x[x < 0] = 1
    return x.sum()


@TRAPS.function("out", inputs=_two)
def out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch.add(x, 1, out=y)
    z = torch.empty(0, dtype=x.dtype)
    torch.mul(x, 2, out=z)
    return z


@TRAPS.function("functions in place")
def functions_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    F.relu(y, inplace=True)
    torch.relu_(y)
    F.dropout(y, 0.5, inplace=True)
    return y


@TRAPS.model("modules in place")
class ModulesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.relu(y)
        return y + y.sum()


@TRAPS.function("copies and fills", inputs=_two)
def copies_and_fills(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.empty_like(x)
    z.copy_(y)
    z.narrow(1, 0, 2).fill_(3)
    z.index_add_(0, torch.zeros(1, dtype=torch.long), torch.ones(1, 4, dtype=x.dtype)) if len(x) else None
    return z.scatter_(1, torch.zeros(x.size(0), 1, dtype=torch.long), 9.0)


@TRAPS.function("shape changed in place")
def shape_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.unsqueeze_(0).transpose_(1, 2)
    return y + torch.zeros(y.shape)


@TRAPS.function("a constant written", skip=frozenset())
def constant_written(x: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(4, dtype=x.dtype)
    table += x.sum(0)
    table[1] = 4
    return table


@TRAPS.function("a list of tensors written", inputs=lambda n=3: ([torch.randn(n, 4), torch.randn(n, 4)],))
def list_written(values: list[torch.Tensor]) -> torch.Tensor:
    for value in values:
        value.add_(1)
    values[0] = values[0] * 2
    return values[0] + values[1]


@TRAPS.function("an input list appended to", inputs=lambda n=3: ([torch.randn(n, 4)],))
def input_list_appended(values: list[torch.Tensor]) -> torch.Tensor:
    values.append(values[0] * 2)
    return values[-1] + 1


@TRAPS.function("an input dict filled", inputs=lambda n=3: ({"x": torch.randn(n, 4)},))
def input_dict_filled(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    batch["y"] = batch["x"] * 2
    return batch["y"] + 1


@TRAPS.function("an expanded tensor", sizes=(5, 2))
def expanded(x: torch.Tensor) -> torch.Tensor:
    y = x[0].expand(x.size(0), 4).clone()
    y[0] += 1
    return y


@TRAPS.function("a tensor swapped for another", inputs=_two)
def swapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z.data = y * 2
    return z + 1


@TRAPS.function("a loop in place", sizes=(5, 1))
def loop_in_place(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty(3, 4, dtype=x.dtype)
    for index in range(3):
        result[index] = x.sum(0) * index
    return result


@TRAPS.function("a write seen through an earlier view")
def seen_through_view(x: torch.Tensor) -> Any:
    y = x * 1
    first = y[0:1]
    flat = y.view(-1)
    flat.add_(100)
    return first, y


@TRAPS.function("read before and after a write", inputs=_two)
def before_and_after(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before = y + 0
    y.mul_(3)
    return before - y


@TRAPS.model("operators of torch.ops that write")
class OperatorsThatWrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.from_numpy(numpy.zeros((2, 4), dtype=numpy.float32))
        torch.ops.aten.add_.Tensor(rows, 1)
        with torch.no_grad():
            torch.ops.aten.add_.Tensor(self.weight, 1)
            torch.ops.aten.mul_.Tensor(torch.ops.aten.slice.Tensor(self.weight, 0, 0, 2), 2)
        return x * self.weight + rows.sum()


@TRAPS.function("operators of torch.ops that give as many as there are", example=4, sizes=(5, 1))
def operators_of_any_length(x: torch.Tensor) -> Any:
    pieces = torch.ops.aten.split.Tensor(x, 2)
    return sum(piece.sum() * index for index, piece in enumerate(pieces, 1)), torch.ops.aten.unbind.int(x)[-1]


@TRAPS.function("zeroed and rebuilt")
def zeroed(x: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(())
    for column in range(x.size(-1)):
        total += x[:, column].sum() * column
    return total
