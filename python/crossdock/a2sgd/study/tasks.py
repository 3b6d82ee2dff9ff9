# SPDX-License-Identifier: Apache-2.0
"""What the study trains: a network on scikit-learn's digits, and the training example's language model on text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from crossdock.errors import InvalidUsage


class Task(Protocol):
    learning_rate: float
    steps_per_epoch: int
    num_epochs: int

    def make_model(self) -> nn.Module: ...
    def loss(self, model: nn.Module, worker: int, step: int) -> Tensor: ...
    def score(self, model: nn.Module) -> tuple[float, float]: ...  # (loss, accuracy) on held-out data


class Digits:
    """1,797 pictures of 8 x 8, ten classes; three layers. Skewed: sorted by class, one contiguous part per worker."""

    learning_rate = 0.05
    num_epochs = 30
    batch = 16

    def __init__(self, workers: int, skewed: bool, seed: int) -> None:
        from sklearn.datasets import load_digits

        data: Any = load_digits()
        random = torch.Generator().manual_seed(100 + seed)
        order = torch.randperm(len(data.target), generator=random, dtype=torch.int64, device="cpu")
        pictures = torch.tensor(data.data, dtype=torch.float32, device="cpu")[order] / 16
        classes = torch.tensor(data.target, dtype=torch.int64, device="cpu")[order]
        self.test = (pictures[:360], classes[:360])
        pictures, classes = pictures[360:], classes[360:]
        if skewed:
            order = classes.argsort(stable=True)
            pictures, classes = pictures[order], classes[order]
        self.shards = list(zip(pictures.chunk(workers), classes.chunk(workers), strict=True))
        self.steps_per_epoch = len(self.shards[-1][0]) // self.batch
        self.seed = seed

    def make_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def loss(self, model: nn.Module, worker: int, step: int) -> Tensor:
        random = torch.Generator().manual_seed(1_000_003 * self.seed + 1009 * step + worker)
        pictures, classes = self.shards[worker]
        chosen = torch.randint(len(pictures), (self.batch,), generator=random, dtype=torch.int64, device="cpu")
        return functional.cross_entropy(model(pictures[chosen]), classes[chosen])

    def score(self, model: nn.Module) -> tuple[float, float]:
        pictures, classes = self.test
        outputs = model(pictures)
        return float(functional.cross_entropy(outputs, classes)), float((outputs.argmax(1) == classes).float().mean())


def _example() -> tuple[Any, Any]:
    folder = Path(__file__).resolve().parents[4] / "examples" / "moe_lm"
    if not (folder / "model.py").exists():
        raise InvalidUsage(
            f"the text model is that of examples/moe_lm, and {folder} is not there: run from the sources"
        )
    sys.path.insert(0, str(folder))
    try:
        import model as example_model  # type: ignore[import-not-found]
        import text as example_text  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(folder))
    return example_model, example_text


class Words:
    """Python's own documentation, byte by byte. A tenth of its blocks is kept for scoring. Skewed: each worker reads a
    part of its own."""

    learning_rate = 0.1
    num_epochs = 8
    steps_per_epoch = 15
    block = 2048
    length, sequences = 32, 8

    def __init__(self, workers: int, skewed: bool, seed: int) -> None:
        self.example, example_text = _example()
        blocks = example_text.Text(self.length).bytes
        blocks = blocks[: len(blocks) // self.block * self.block].view(-1, self.block)
        is_kept = torch.arange(len(blocks), dtype=torch.int64, device="cpu") % 10 == 0
        kept, blocks = blocks[is_kept], blocks[~is_kept]
        self.shards = list(blocks.chunk(workers)) if skewed else [blocks] * workers
        self.seed = seed
        self.test = self._batch(kept, 64, torch.Generator().manual_seed(7))

    def make_model(self) -> nn.Module:
        example = self.example
        shape = example.Shape(num_experts=4, num_topk=2, hidden=32, num_layers=1, length=self.length)
        model: nn.Module = example.Model(shape, lambda shape, gate, layer: example.PlainMoe(shape, gate, layer))
        torch.manual_seed(self.seed)
        with torch.no_grad():
            for parameter in model.parameters():  # the example's weights are the same for every seed
                parameter.add_(0.01 * torch.randn_like(parameter))
        return model

    def loss(self, model: nn.Module, worker: int, step: int) -> Tensor:
        random = torch.Generator().manual_seed(1_000_003 * self.seed + 1009 * step + worker)
        inputs, targets = self._batch(self.shards[worker], self.sequences, random)
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def score(self, model: nn.Module) -> tuple[float, float]:
        inputs, targets = self.test
        outputs = model(inputs).flatten(0, 1)
        correct = (outputs.argmax(1) == targets.flatten()).float().mean()
        return float(functional.cross_entropy(outputs, targets.flatten())), float(correct)

    def _batch(self, blocks: Tensor, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        rows, starts = (
            torch.randint(most, (count,), generator=random, dtype=torch.int64, device="cpu").tolist()
            for most in (len(blocks), self.block - self.length)
        )
        windows = [blocks[row, start : start + self.length + 1] for row, start in zip(rows, starts, strict=True)]
        batch = torch.stack(windows).long()
        return batch[:, :-1], batch[:, 1:]


TASKS: dict[str, type[Digits] | type[Words]] = {"digits": Digits, "text": Words}
