"""Quantization-aware training on a real task: scikit-learn's digits and a small network, in floats, in 8 bits and in 4.
Run it with `python -m benchmarks.quantizing.digits`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from torchgraft.quantize import convert, prepare_qat, quantize
from torchgraft.quantize.native import to_native


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    parts = train_test_split(images, torch.tensor(found.target), test_size=0.33, random_state=0, stratify=found.target)
    return parts[0], parts[2], parts[1], parts[3]


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int, rate: float) -> None:
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for part in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
        schedule.step()
    model.eval()


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def results(seed: int = 0) -> dict[str, float]:
    """The share of digits that are read right, by each."""
    torch.manual_seed(seed)
    images, labels, others, their_labels = data()
    model = network()
    train(model, images, labels, 20, 3e-3)
    calibration = list(images.split(64))[:8]
    found = {"fp32": accuracy(model, others, their_labels)}
    for bits in (8, 4):
        program = quantize(model, calibration, config=f"static-int{bits}")
        found[f"post-training int{bits}"] = accuracy(program, others, their_labels)
    program = prepare_qat(model, images[:2], config="static-int4", freeze_after=200)
    train(program, images, labels, 15, 1e-3)
    found["QAT int4"] = accuracy(to_native(convert(program)), others, their_labels)
    return found


if __name__ == "__main__":
    for name, value in results().items():
        print(f"{name:20} {value:.2%}")
