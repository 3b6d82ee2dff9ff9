# SPDX-License-Identifier: Apache-2.0
"""CPU ranks in one line: a program is run once per rank, in threads or in processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from crossdock import _core
from crossdock._core import Communicator
from crossdock.errors import InvalidArgument, InvalidUsage, RemoteError, SystemFailure

PR_SET_PDEATHSIG = 1
MOST_RANKS = 4096
GRACE_S = 5.0  # for processes to end after SIGTERM

Result = TypeVar("Result")


def run_threads(num_ranks: int, program: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Runs program(communicator, *arguments) once per rank, each in a thread, and returns what they returned.

    It waits until all programs have ended. An exception of one of them ends the waits of the others' calls, and so does
    Ctrl-C.
    If programs raise exceptions, that of the lowest rank is raised here. A RemoteError only reports the failure of
    another rank, so it is raised only if there is no other exception.
    """
    _expect_number(num_ranks)
    communicators = Communicator.create_threads(num_ranks)
    results: list[Any] = [None] * num_ranks
    failures: list[BaseException | None] = [None] * num_ranks

    def run(communicator: Communicator) -> None:
        rank = communicator.rank
        try:
            results[rank] = program(communicator, *arguments)
        except BaseException as failure:
            failures[rank] = failure
            _core.end_all_waits(True)  # the others may wait for this rank

    threads = [threading.Thread(target=run, args=(communicator,)) for communicator in communicators]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C, which only this thread gets
        _core.end_all_waits(True)
        for thread in threads:
            thread.join()
        raise
    finally:
        _core.end_all_waits(False)
    _raise_cause(failures)
    return results


def _expect_number(num_ranks: int) -> None:
    if not isinstance(num_ranks, int) or not 1 <= num_ranks <= MOST_RANKS:
        raise InvalidArgument(f"num_ranks is {num_ranks!r}, allowed: 1..{MOST_RANKS}")


def _raise_cause(failures: Sequence[BaseException | None]) -> None:
    found = [failure for failure in failures if failure is not None]
    for failure in [failure for failure in found if not isinstance(failure, RemoteError)] or found:
        raise failure


def run_processes(num_ranks: int, program: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Runs program(communicator, *arguments) once per rank, each in its own process, and returns what they returned.

    - The processes are spawned. So program, arguments and results must be picklable, and a script needs the usual
      `if __name__ == "__main__"`.
    - After `multiprocessing.set_start_method("forkserver")` they come from the fork server. It starts faster if it has
      the modules that your program needs (`set_forkserver_preload`). The ranks have the environment variables that
      were set when the server started.
    - When all have ended, exceptions are raised as by run_threads. A process that ends without a result is a
      SystemFailure with its exit code.
    - No process outlives this call, even if Ctrl-C or a signal ends it.
    """
    _expect_number(num_ranks)
    unique_id = Communicator.unique_id()
    # Not a plain fork: the ranks would wait for locks that threads of this process hold.
    has_server = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    context = multiprocessing.get_context("forkserver") if has_server else multiprocessing.get_context("spawn")
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            own = (sender, num_ranks, rank, unique_id, program, arguments)
            # Not daemonic: those could not start processes themselves, as loaders of data do.
            process = context.Process(target=_run_rank, args=own)
            ranks.append((process, receiver))
            process.start()
            sender.close()  # so that the pipe ends with the process
        outcomes = [_outcome_of(rank, *ranks[rank]) for rank in range(num_ranks)]
    finally:
        _end([process for process, _ in ranks])
        Communicator.release_unique_id(unique_id)
    _raise_cause([failure for _, failure in outcomes])
    return [result for result, _ in outcomes]


Outcome = tuple[Any, BaseException | None]


def _run_rank(
    sender: Connection,
    num_ranks: int,
    rank: int,
    unique_id: bytes,
    program: Callable[..., Any],
    arguments: Any,
) -> None:
    outcome: Outcome
    has_result = False
    _die_with_launcher()
    try:
        with Communicator.join(num_ranks, rank, unique_id) as communicator:
            outcome = program(communicator, *arguments), None
            has_result = True
    except BaseException as failure:
        # What the program has left open ends with the process, as a DeepEP buffer does by default.
        if not (has_result and isinstance(failure, InvalidUsage)):
            outcome = None, failure
    sender.send_bytes(_pickled(rank, outcome))


def _die_with_launcher() -> None:
    """Ends this process with the launcher, also one that a signal ends at once."""
    launcher = multiprocessing.parent_process()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher is None or not launcher.is_alive():
        os._exit(1)
    if launcher.pid != os.getppid():  # which is a fork server, and lives as long as the processes that it made
        threading.Thread(target=_end_behind, args=(launcher,), daemon=True).start()


def _end_behind(launcher: BaseProcess) -> None:
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _pickled(rank: int, outcome: Outcome) -> bytes:
    """With the traceback as a note; an exception that cannot be pickled is replaced by its text."""
    result, failure = outcome
    if failure is not None:
        failure.add_note(f"on rank {rank}:\n" + "".join(traceback.format_exception(failure)))
    try:
        pickled = pickle.dumps(outcome)
        if failure is not None:
            pickle.loads(pickled)  # some exceptions can only be written
    except Exception as error:
        what = f"result is of type {type(result).__name__}" if failure is None else f"exception is {failure!r}"
        unsent = InvalidUsage(f"rank {rank}'s {what}, which cannot be pickled: {error!r}")
        unsent.__notes__ = getattr(failure, "__notes__", [])
        return pickle.dumps((None, unsent))
    return pickled


def _outcome_of(rank: int, process: BaseProcess, receiver: Connection) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        return None, SystemFailure(f"rank {rank}'s process ended without a result, with exit code {process.exitcode}")
    process.join()
    return outcome


def _end(processes: list[BaseProcess]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.terminate()  # those that have ended are left alone
    for process in started:
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()
