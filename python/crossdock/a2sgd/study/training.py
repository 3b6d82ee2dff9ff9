# SPDX-License-Identifier: Apache-2.0
"""One run: workers train replicas in turn, in one process, with one way to average."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crossdock.a2sgd.study.arms import make_arm
from crossdock.a2sgd.study.tasks import TASKS

MOMENTUM, WEIGHT_DECAY, WARM_UP = 0.9, 1e-4, 5  # epochs; the paper's


@dataclass(frozen=True)
class Setting:
    task: str
    arm: str
    workers: int
    skewed: bool
    seed: int
    epochs: int = 0  # 0: the task's


def _replicas(make: Any, workers: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """Equal models whose parameters and gradients are rows of two matrices."""
    models = [make() for _ in range(workers)]
    flat = torch.cat([parameter.detach().flatten() for parameter in models[0].parameters()])
    values = flat.repeat(workers, 1)
    gradients = torch.zeros_like(values)
    for model, value, gradient in zip(models, values, gradients, strict=True):
        _tie(model, value, gradient)
    return models, values, gradients


def _tie(model: nn.Module, value: Tensor, gradient: Tensor) -> None:
    first = 0
    for parameter in model.parameters():
        part = slice(first, first + parameter.numel())
        parameter.data = value[part].view(parameter.shape)
        parameter.grad = gradient[part].view(parameter.shape)
        first = part.stop


def run(setting: Setting) -> dict[str, Any]:
    """Curves with one point per epoch. loss and accuracy are means over the workers' replicas, on held-out data;
    final_loss and final_accuracy are those of the replicas' mean, which is what a last averaging would give."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    task = TASKS[setting.task](setting.workers, setting.skewed, setting.seed)
    models, values, gradients = _replicas(task.make_model, setting.workers)
    mean_model = task.make_model()
    velocity = torch.zeros_like(values)
    arm = make_arm(setting.arm, gradients, setting.seed)
    names = ("train_loss", "loss", "accuracy", "worst_accuracy", "final_loss", "final_accuracy", "drift")
    curves: dict[str, list[float]] = {name: [] for name in names}
    epochs = setting.epochs or task.num_epochs
    averaging_s, step = 0.0, 0
    for epoch in range(epochs):
        rate = task.learning_rate * min(1.0, (epoch + 1) / min(WARM_UP, epochs))
        train_loss = 0.0
        for _ in range(task.steps_per_epoch):
            gradients.zero_()
            for worker, model in enumerate(models):
                loss = task.loss(model, worker, step)
                loss.backward()
                train_loss += float(loss.detach())
            with torch.no_grad():
                before = time.perf_counter()
                arm.average(gradients)
                averaging_s += time.perf_counter() - before
                velocity.mul_(MOMENTUM).add_(gradients).add_(values, alpha=WEIGHT_DECAY)
                values.sub_(velocity, alpha=rate)
            step += 1
        with torch.no_grad():
            mean = values.mean(dim=0)
            _tie(mean_model, mean, torch.zeros_like(mean))
            scores = [task.score(model) for model in models]
            final_loss, final_accuracy = task.score(mean_model)
            apart = (values - mean).square().sum(dim=1).mean().sqrt()
            point = (
                train_loss / task.steps_per_epoch / setting.workers,
                sum(loss for loss, _ in scores) / len(scores),
                sum(accuracy for _, accuracy in scores) / len(scores),
                min(accuracy for _, accuracy in scores),
                final_loss,
                final_accuracy,
                float(apart / mean.norm()),
            )
        for name, value in zip(names, point, strict=True):
            curves[name].append(round(value, 5))
    bits = arm.message_bits()
    arm.close()
    return {
        **asdict(setting),
        "entries": values.shape[1],
        "steps": step,
        "bits_per_worker_and_step": bits,
        "bits_of_final_averaging": 32 * values.shape[1],
        "averaging_us_per_step": round(averaging_s / step * 1e6, 1),
        "seconds": round(time.perf_counter() - begin, 2),
        "curves": curves,
    }
