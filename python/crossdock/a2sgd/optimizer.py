# SPDX-License-Identifier: Apache-2.0
"""A2SGD around any optimizer of torch, over any Communicator."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from crossdock._core import A2sgd, A2sgdReport, Communicator
from crossdock.a2sgd.replicas import average_parameters
from crossdock.copies import Uncopied
from crossdock.errors import InvalidArgument, InvalidUsage


class Optimizer(Uncopied):
    """Averages the gradients' means by sign, then steps with the wrapped optimizer.

    Collective: every rank makes it, steps, and closes it, with a model of the same size. scope "model" (the paper's):
    one gradient over all parameters; "group": one for each of the optimizer's param_groups. average_every n: after
    every n-th step the parameters of all ranks are averaged, too. skip_nonfinite: where any rank's gradient holds a NaN
    or an infinity, no rank steps (this waits for the device). names: of the parameters, for reports:
    named_parameters(). Between begin() and step(), gradients must not change: no zero_grad(), no clipping. A step
    is refused if other parameters need a gradient than when it was made.
    """

    _remedy = "save the state_dict() of its optimizer, and make it anew around another one"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        *,
        scope: Literal["model", "group"] = "model",
        average_every: int = 0,
        skip_nonfinite: bool = False,
        sums: str = "fp32",
        timeout_s: float = 0.0,
        names: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        if scope not in ("model", "group"):
            raise InvalidArgument(f"scope is {scope!r}, allowed: 'model', 'group'")
        if sums not in ("fp32", "fp64"):
            raise InvalidArgument(f"sums is {sums!r}, allowed: 'fp32', 'fp64'")
        if not isinstance(average_every, numbers.Integral) or average_every < 0:
            raise InvalidArgument(f"average_every is {average_every!r}, allowed: 0 (never) and more")
        if not hasattr(optimizer, "param_groups"):
            raise InvalidArgument(f"optimizer is a {type(optimizer).__name__}, expected: one of torch.optim")
        if not isinstance(communicator, Communicator):
            raise InvalidArgument(f"communicator is a {type(communicator).__name__}, expected: a Communicator")
        self.optimizer, self.communicator = optimizer, communicator
        self.average_every = average_every
        self.num_steps = 0
        self.num_skipped = 0
        self._skips = skip_nonfinite
        self._options: dict[str, Any] = {"sums": sums, "skip_nonfinite": skip_nonfinite, "timeout_s": timeout_s}
        self._names = {parameter: name for name, parameter in names}
        groups = self._trained()
        self._sets: list[list[Tensor]] = groups if scope == "group" else [[p for group in groups for p in group]]
        self._averagers: list[A2sgd] = []
        self._gradients: dict[Tensor, Tensor] = {}  # of the step that has begun, by parameter
        self._is_closed = False

    def begin(self) -> None:
        """The first half of a step: call it as soon as the gradient is ready; otherwise step() does."""
        self._expect_open()
        if self._gradients:
            raise InvalidUsage("a step has begun: call step() first")
        known = {p for parameters in self._sets for p in parameters}
        trained = {p for group in self._trained() for p in group}
        if trained != known:
            raise InvalidUsage(
                f"{len(trained - known)} of the optimizer's parameters are new since this Optimizer was made, and "
                f"{len(known - trained)} need no gradient any more: close it, and make it anew on all ranks"
            )
        gradients = {p: self._gradient_of(p) for parameters in self._sets for p in parameters}
        sets = [[gradients[p] for p in parameters] for parameters in self._sets]
        if not self._averagers:
            for parameters, pieces in zip(self._sets, sets, strict=True):
                names = [self._names.get(p, f"parameter {i}") for i, p in enumerate(parameters)]
                self._averagers.append(A2sgd(self.communicator, pieces, names=names, **self._options))
        for averager, pieces in zip(self._averagers, sets, strict=True):
            averager.set_pieces(pieces)
            averager.begin()
        self._gradients = gradients

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise InvalidUsage("a closure that computes the loss again would change gradients between the halves")
        self._expect_open()
        if not self._gradients:
            self.begin()
        if others := sum(p.grad is not gradient for p, gradient in self._gradients.items()):
            raise InvalidUsage(
                f"{others} gradients are not those that begin() read: change gradients, as zero_grad() does, before "
                "begin() or after step()"
            )
        self._gradients = {}
        for averager in self._averagers:
            averager.end()
        self.num_steps += 1
        if self._skips and any(report.skipped for report in self.reports()):
            self.num_skipped += 1
            return None
        result = self.optimizer.step()
        if self.average_every and self.num_steps % self.average_every == 0:
            self.average_parameters()
        return result

    def reports(self) -> list[A2sgdReport]:
        """Reports of the latest step, one per gradient of the scope."""
        return [averager.report() for averager in self._averagers]

    def average_parameters(self) -> None:
        """Averages the replicas: periodically, or once at the end."""
        average_parameters([p for parameters in self._sets for p in parameters], self.communicator)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def close(self) -> None:
        """Collective. Repeating it is fine."""
        self._is_closed = True
        for averager in self._averagers:
            averager.close()
        self._averagers = []
        self._gradients = {}

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()

    def _expect_open(self) -> None:
        if self._is_closed:
            raise InvalidUsage("the Optimizer is closed")

    def _trained(self) -> list[list[Tensor]]:
        """The parameters that need a gradient, by param_groups."""
        return [[p for p in group["params"] if p.requires_grad] for group in self.optimizer.param_groups]

    def _gradient_of(self, parameter: Tensor) -> Tensor:
        """Parameters without a gradient count as zeros: every rank must have as many entries."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()
        return parameter.grad
