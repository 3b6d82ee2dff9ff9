# SPDX-License-Identifier: Apache-2.0
"""Worlds of CPU ranks in one line: a program is run once a rank, in threads or in processes."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from crossdock._core import Communicator
from crossdock.errors import RemoteError

Result = TypeVar("Result")


def run_threads(num_ranks: int, program: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Runs program(communicator, *arguments) once a rank, each in a thread, and returns what they returned.

    If programs raise, all are awaited, and the first exception by rank is raised here; a RemoteError, which tells of
    another rank's trouble, only if there is no other.
    """
    results: list[Any] = [None] * num_ranks
    failures: list[BaseException | None] = [None] * num_ranks

    def run(communicator: Communicator) -> None:
        rank = communicator.rank
        try:
            results[rank] = program(communicator, *arguments)
        except BaseException as failure:
            failures[rank] = failure

    communicators = Communicator.create_threads(num_ranks)
    threads = [threading.Thread(target=run, args=(communicator,)) for communicator in communicators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _raise_cause(failures)
    return results


def _raise_cause(failures: Sequence[BaseException | None]) -> None:
    found = [failure for failure in failures if failure is not None]
    for failure in [failure for failure in found if not isinstance(failure, RemoteError)] or found:
        raise failure


def _run_rank(num_ranks: int, rank: int, unique_id: bytes, program: Callable[..., Result], arguments: Any) -> Result:
    with Communicator.join(num_ranks, rank, unique_id) as communicator:
        return program(communicator, *arguments)


def run_processes(num_ranks: int, program: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Runs program(communicator, *arguments) once a rank, each in a process of its own, and returns what they returned.

    Processes are spawned, so program, arguments and results must be picklable, and a script needs the usual
    `if __name__ == "__main__"`. Exceptions are raised as those of run_threads, when all have ended.
    """
    unique_id = Communicator.unique_id()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_ranks, mp_context=context) as pool:
        ranks = [pool.submit(_run_rank, num_ranks, rank, unique_id, program, arguments) for rank in range(num_ranks)]
    _raise_cause([rank.exception() for rank in ranks])
    return [rank.result() for rank in ranks]
