# SPDX-License-Identifier: Apache-2.0
"""crossdock.A2sgd over arrays, in threads and processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import crossdock as ep


def gradient_of(rank: int, step: int = 0, size: int = 500) -> np.ndarray[Any, Any]:
    return np.random.default_rng([rank, step]).standard_normal(size).astype(np.float32)


def moved(gradients: list[np.ndarray[Any, Any]], rank: int) -> np.ndarray[Any, Any]:
    """The definition, in float64."""
    own = gradients[rank].astype(np.float64)
    ups = [g[g >= 0].mean(dtype=np.float64) if (g >= 0).any() else 0.0 for g in gradients]
    downs = [-g[g < 0].mean(dtype=np.float64) if (g < 0).any() else 0.0 for g in gradients]
    up, down = np.mean(ups) - ups[rank], downs[rank] - np.mean(downs)
    result: np.ndarray[Any, Any] = np.where(own >= 0, own + up, own + down)
    return result


@pytest.mark.parametrize("run", [ep.run_threads, ep.run_processes])
def test_steps_follow_the_definition(run: Any) -> None:
    for result in run(3, _three_steps):
        assert result == []


def _three_steps(comm: ep.Communicator) -> list[str]:
    wrong = []
    gradient = np.zeros(500, np.float32)
    with ep.A2sgd(comm, [gradient[:200], gradient[200:]], names=["first", "second"], sums="fp64") as averager:
        for step in range(3):
            everybody = [gradient_of(rank, step) for rank in range(comm.num_ranks)]
            gradient[:] = everybody[comm.rank]
            averager.begin()
            averager.end()
            if not np.allclose(gradient, moved(everybody, comm.rank), rtol=0, atol=2e-6):
                wrong.append(f"step {step}")
            report = averager.report()
            if report.step != step + 1 or report.count != 500:
                wrong.append(f"report of step {report.step}")
    return wrong


def test_wrong_use_is_refused_with_a_message() -> None:
    def program(comm: ep.Communicator) -> None:
        gradient = np.zeros(10, np.float32)
        with pytest.raises(ep.InvalidArgument, match="sums is 'fp8'"):
            ep.A2sgd(comm, [gradient], sums="fp8")
        with pytest.raises(ep.InvalidArgument, match="weights"):
            ep.A2sgd(comm, [np.zeros(3, np.int32)], names=["weights"])
        with pytest.raises(ep.InvalidArgument, match="pieces is empty, allowed: one array or more"):
            ep.A2sgd(comm, [])
        with pytest.raises(ep.InvalidArgument, match="names has 1 items, expected as many as pieces: 2"):
            ep.A2sgd(comm, [np.zeros(3, np.float32)] * 2, names=["weights"])
        with pytest.raises(ep.InvalidUsage, match="10 on rank 0, 11 on rank 1"):
            ep.A2sgd(comm, [np.zeros(10 + comm.rank, np.float32)])
        with ep.A2sgd(comm, [gradient]) as averager:
            with pytest.raises(ep.InvalidUsage, match="Begin"):
                averager.end()
            with pytest.raises(ep.InvalidArgument, match="expected 10"):
                averager.set_pieces([np.zeros(9, np.float32)])
        with pytest.raises(ep.InvalidUsage, match="closed"):
            averager.begin()

    ep.run_threads(2, program)
