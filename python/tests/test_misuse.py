# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments, wrong order, objects used too late, threads, fork: an exception with a message, never a crash."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossdock as ep


def settings(**fields: Any) -> dict[str, Any]:
    return {"num_experts": 2, "max_dispatch_tokens_per_rank": 4, "max_token_bytes": 64} | fields


def routing(num_tokens: int = 2) -> Any:
    return np.zeros((num_tokens, 1), np.int64)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"num_experts": 0}, ep.InvalidArgument, "num_experts is 0"),
        ({"max_token_bytes": 0}, ep.InvalidArgument, "max_token_bytes"),
        ({"number_of_experts": 2}, TypeError, "GroupConfig has no field number_of_experts"),
        ({"__class__": 2}, TypeError, "no field __class__"),
        ({"num_experts": -2}, ep.InvalidArgument, "num_experts is -2, allowed: 0..4294967295"),
        ({"num_experts": 2**40}, ep.InvalidArgument, "num_experts is 1099511627776, allowed: 0..4294967295"),
        ({"num_experts": "many"}, TypeError, "num_experts is many"),
        ({"algorithm": ep.Layout.FLAT}, TypeError, "algorithm"),
        ({"num_topk": 3}, ep.InvalidArgument, "num_topk is 3"),
        ({"ht_masks": True}, ep.InvalidUsage, "ht_masks"),
        ({"ht_masks": "some"}, ep.InvalidArgument, "ht_masks is some, allowed: True, False"),
        ({"lsa_team_size": 7}, ep.InvalidArgument, "lsa_team_size is 7"),
        ({"lsa_team_size": None}, ep.InvalidArgument, "lsa_team_size is None, allowed: the number of ranks"),
    ],
)
def test_configurations(fields: dict[str, Any], kind: type[Exception], message: str) -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, pytest.raises(kind, match=message):
        ep.Group(comm, **settings(**fields))


def test_numbers_of_choices() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.Group(comm, **settings()) as group:
        for call in (group.init_handle, group.handle_mem_size):
            for wrong in (2**40, None, "two"):
                with pytest.raises(ep.InvalidArgument, match=f"num_topk is {wrong}, allowed: 1..64"):
                    call(ep.Layout.EXPERT_MAJOR, wrong)  # type: ignore[arg-type]


def test_a_configuration_object_and_keywords_together() -> None:
    [comm] = ep.Communicator.create_threads(1)
    config = ep.GroupConfig(**settings(timeout_ns=5))
    with comm, ep.Group(comm, config, num_experts=4) as group:
        assert config.num_experts == 2
        assert group.create_handle(ep.Layout.EXPERT_MAJOR, np.full((1, 1), 3)).ptr != 0


@pytest.mark.parametrize("comm", [None, "comm", 0, object(), 1.5])
def test_what_is_no_communicator(comm: Any) -> None:
    with pytest.raises(ep.InvalidArgument):
        ep.Group(comm, **settings())


def test_communicators() -> None:
    for num_ranks in (0, -1, 4097):
        with pytest.raises(ep.InvalidArgument, match="4096"):
            ep.Communicator.create_threads(num_ranks)
    with pytest.raises(ep.InvalidArgument, match="unique_id has 3 bytes, expected 128"):
        ep.Communicator.join(1, 0, b"abc")
    with pytest.raises(ep.InvalidArgument):
        ep.Communicator.join(2, 5, ep.Communicator.unique_id())
    [comm] = ep.Communicator.create_threads(1)
    comm.close()
    comm.close()
    with pytest.raises(ep.InvalidUsage, match="the communicator is closed"):
        comm.barrier()
    with pytest.raises(ep.InvalidUsage, match="the communicator is closed"):
        ep.Group(comm, **settings())


def test_a_communicator_stays_while_it_has_groups() -> None:
    [comm] = ep.Communicator.create_threads(1)
    group = ep.Group(comm, **settings())
    with pytest.raises(ep.InvalidUsage):
        comm.close()
    group.close()
    comm.close()


def test_every_call_on_closed_objects() -> None:
    [comm] = ep.Communicator.create_threads(1)
    group = ep.Group(comm, **settings(enable_mask=True))
    handle = group.create_handle(ep.Layout.EXPERT_MAJOR, routing())
    closed_first = group.create_handle(ep.Layout.EXPERT_MAJOR, routing())
    closed_first.close()
    closed_first.close()
    with pytest.raises(ep.InvalidUsage, match="the handle is closed"):
        closed_first.complete()
    group.close()
    group.close()
    tokens = np.zeros((2, 4), np.float32)
    calls: list[Callable[[], object]] = [
        lambda: handle.update(routing()),
        lambda: handle.dispatch(tokens, tokens),
        lambda: handle.combine(tokens, tokens),
        lambda: handle.complete(),
        lambda: handle.set_sums(ep.Sums.EXACT),
        lambda: handle.set_sms(1),
        lambda: handle.sms,
        lambda: handle.rebind(routing()),
        lambda: group.create_handle(ep.Layout.EXPERT_MAJOR, routing()),
        lambda: group.init_handle(ep.Layout.EXPERT_MAJOR, 1),
        lambda: group.handle_mem_size(ep.Layout.EXPERT_MAJOR, 1),
        lambda: group.memory(),
        lambda: group.memory_use(),
        lambda: group.mask_query(),
        lambda: group.mask_update([1]),
        lambda: group.mask_clean(),
        lambda: group.get_async_error(),
        lambda: group.error_clear(),
        lambda: group.diagnosis(),
    ]
    for call in calls:
        with pytest.raises(ep.InvalidUsage, match="the group is closed"):
            call()
    handle.close()
    comm.close()


def test_wrong_calls_leave_the_group_usable() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.Group(comm, **settings()) as group:
        tokens, received, counts = np.ones((2, 4), np.float32), np.zeros((2, 4, 4), np.float32), np.zeros(2, np.int32)
        info = ep.LayoutInfo(expert_counters=counts)
        any_counts: Any = counts
        handle = group.init_handle(ep.Layout.EXPERT_MAJOR, 1)
        wrong: list[tuple[Any, type[Exception], str]] = [
            (lambda: handle.dispatch(tokens, received, layout_info=info), ep.InvalidUsage, "no routing"),
            (lambda: handle.update(None), ep.InvalidArgument, "topk_idx is None"),
            (lambda: handle.update(np.zeros((2, 2), np.int64)), ep.InvalidArgument, "topk_idx"),
            (lambda: handle.update(np.zeros((2, 1), np.float32)), ep.InvalidArgument, "allowed: int32, int64"),
            (lambda: handle.update(routing(5)), ep.InvalidArgument, "at most max_dispatch_tokens_per_rank"),
            (lambda: handle.combine(received, tokens), ep.InvalidUsage, "no routing"),
            (lambda: group.create_handle(ep.Layout.FLAT, routing()), ep.InvalidArgument, "layout is 3"),
            (lambda: group.init_handle(ep.Layout.EXPERT_MAJOR, 1, alignment=2), TypeError, "no field alignment"),
            (lambda: group.mask_query(), ep.InvalidUsage, "enable_mask"),
        ]
        for call, kind, message in wrong:
            with pytest.raises(kind, match=message):
                call()
        handle.update(routing())
        wrong = [
            (lambda: handle.dispatch(tokens, received), ep.InvalidArgument, "expert_counters"),
            (lambda: handle.dispatch(tokens, received, layout_info=any_counts), ep.InvalidArgument, "LayoutInfo, None"),
            (lambda: handle.dispatch(tokens[:1], received, layout_info=info), ep.InvalidArgument, "rows"),
            (lambda: handle.dispatch(tokens, received, layout_info=info, send=1), TypeError, "no field send"),
            (lambda: handle.dispatch(None, received, layout_info=info), ep.InvalidArgument, "inputs.tokens is None"),
            (
                lambda: handle.dispatch(tokens, received.astype(np.float16), layout_info=info),
                ep.InvalidArgument,
                "type",
            ),
            (lambda: handle.dropped_tokens(np.zeros(1, np.int32)), ep.InvalidArgument, "int64"),
        ]
        for call, kind, message in wrong:
            with pytest.raises(kind, match=message):
                call()
        handle.dispatch(tokens, received, layout_info=info)
        assert counts.tolist() == [2, 0]
        handle.close()


def test_hooks_for_device_memory() -> None:
    """Python's functions give and take the group's memory; one that fails is an exception, and nothing is leaked."""
    live: dict[int, Any] = {}
    is_poor = False

    @ep.AllocFn  # type: ignore[untyped-decorator,unused-ignore]
    def allocate(pointer: Any, size: int, context: Any) -> int:
        if is_poor:
            return 2
        memory: Any = ep.Memory(size)
        pointer[0] = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        live[pointer[0]] = memory
        return 0

    @ep.FreeFn  # type: ignore[untyped-decorator,unused-ignore]
    def free(pointer: int, context: Any) -> int:
        del live[pointer]
        return 0

    [comm] = ep.Communicator.create_threads(1)
    hooks = ep.AllocConfig(alloc_fn=ep.address_of(allocate), free_fn=ep.address_of(free))
    with comm:
        with ep.Group(comm, **settings(alloc=hooks)) as group:
            with group.create_handle(ep.Layout.EXPERT_MAJOR, routing()):
                assert live
                use = group.memory_use()
                assert use.allocator_bytes == sum(np.frombuffer(memory, np.uint8).size for memory in live.values())
                assert 0 < use.handle_bytes < use.allocator_bytes
                assert use.symmetric_bytes == group.memory()[0] > 0
                is_poor = True
                with pytest.raises(ep.UnhandledCudaError, match="alloc"):
                    group.create_handle(ep.Layout.EXPERT_MAJOR, routing())
            group.create_handle(ep.Layout.EXPERT_MAJOR, routing()).close()
        assert not live
        with pytest.raises(ep.InvalidUsage, match="has only alloc_fn"):
            ep.Group(comm, **settings(alloc=ep.AllocConfig(alloc_fn=ep.address_of(allocate))))


def test_arrays_that_are_dropped_early() -> None:
    """The routing is read until the combine, the arrays of a split operation until its end."""
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.Group(comm, **settings()) as group:
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, np.ones((2, 1), np.int64))
        counts = np.zeros(2, np.int32)
        received = np.zeros((2, 4, 4), np.float32)
        handle.dispatch(
            np.full((2, 4), 7, np.float32),
            ep.DispatchOutputs(tokens=received),
            layout_info=ep.LayoutInfo(expert_counters=counts),
            send_only=True,
        )
        garbage = [np.full((64,), 9, np.int64) for _ in range(1000)]
        gc.collect()
        handle.complete()
        assert counts.tolist() == [0, 2]
        assert (received[1, :2] == 7).all()
        del garbage
        handle.close()


def wait_until_in_call(thread: threading.Thread, function: Any) -> None:
    """Until the thread is in the function's last line, a call that lets other threads run: this one, which looks."""
    code = function.__code__
    last_line = max(line for _, _, line in code.co_lines() if line is not None)
    while True:
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is not None and frame.f_code is code and frame.f_lineno == last_line:
            break
        time.sleep(0.001)
    time.sleep(0.1)  # from there to the group


def test_memory_of_a_dropped_handle_stays_until_it_is_destroyed() -> None:
    """Here another thread is in a call of the group, so that comes later."""
    has_looked = threading.Event()

    def program(comm: ep.Communicator) -> None:
        def dispatch(handle: ep.Handle, **fields: Any) -> None:
            tokens, received = np.ones((1, 4), np.float32), np.zeros((1, 8, 4), np.float32)
            info = ep.LayoutInfo(expert_counters=np.zeros(1, np.int32))
            handle.dispatch(tokens, received, layout_info=info, **fields)

        with ep.Group(comm, **settings()) as group:
            memory = mmap.mmap(-1, group.handle_mem_size(ep.Layout.EXPERT_MAJOR, 1))
            first = group.init_handle(ep.Layout.EXPERT_MAJOR, 1, handle_mem=np.frombuffer(memory, np.uint8))
            first.update(np.array([[1 - comm.rank]]))
            second = group.create_handle(ep.Layout.EXPERT_MAJOR, np.array([[1 - comm.rank]]))
            dispatch(first, send_only=True)
            if comm.rank == 0:
                other = threading.Thread(target=dispatch, args=(second,))
                other.start()
                wait_until_in_call(other, dispatch)
                del first
                with pytest.raises(BufferError):
                    memory.close()
                has_looked.set()
                other.join()
                group.memory()
                memory.close()
            else:
                assert has_looked.wait(100)
                first.complete()
                dispatch(second)

    ep.run_threads(2, program)


def outcome(program: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def test_the_interpreter_ends_while_a_thread_is_in_a_call() -> None:
    """Its thread rests from then on, whatever the call does."""
    program = """
import threading, time, numpy as np, crossdock as ep
def serve(comm):
    with ep.Group(comm, num_experts=2, max_dispatch_tokens_per_rank=4, max_token_bytes=16) as group:
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, np.zeros((2, 1), np.int64))
        info = ep.LayoutInfo(expert_counters=np.zeros(2, np.int32))
        while True:
            handle.dispatch(np.ones((2, 4), np.float32), np.zeros((2, 4, 4), np.float32), layout_info=info)
[comm] = ep.Communicator.create_threads(1)
threading.Thread(target=serve, args=(comm,), daemon=True).start()
time.sleep(0.2)
"""
    for _ in range(3):
        assert outcome(program) == (0, "")


def test_a_child_forked_while_a_thread_is_in_a_call_is_refused() -> None:
    program = """
import os, threading, time, warnings, crossdock as ep
warnings.simplefilter("ignore")
first, second = ep.Communicator.create_threads(2)
waiting = threading.Thread(target=first.barrier)
waiting.start()
time.sleep(0.2)
if os.fork() == 0:
    for call in (first.barrier, first.close):
        try:
            call()
        except ep.InvalidUsage as error:
            print("made before fork()" in str(error), flush=True)
    os._exit(0)
os.wait()
second.barrier()
waiting.join()
"""
    assert outcome(program) == (0, "True\nTrue\n")


def test_groups_that_are_not_closed_are_told_and_harmless() -> None:
    [comm] = ep.Communicator.create_threads(1)
    group = ep.Group(comm, **settings())
    handle = group.create_handle(ep.Layout.EXPERT_MAJOR, routing())
    with pytest.warns(ResourceWarning, match="was not closed"):
        del group
        gc.collect()
    handle.update(routing())
    del handle
    with pytest.raises(ep.InvalidUsage):
        comm.close()


def test_uninitialised_objects() -> None:
    kinds: list[Any] = [ep.Handle, ep.Communicator, ep.Window, ep.Diagnosis]
    for kind in kinds:
        with pytest.raises(TypeError):
            kind()
        with pytest.raises(TypeError):
            pickle.dumps(kind.__new__(kind))


def test_a_forked_child_is_refused() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.Group(comm, **settings()) as group:
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, routing())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            refused = 0
            for call in (comm.barrier, handle.complete, group.close, group.memory):
                try:
                    call()
                except ep.InvalidUsage as error:
                    refused += "made before fork()" in str(error)
            handle.close()
            [own] = ep.Communicator.create_threads(1)
            with own, ep.Group(own, **settings()):
                refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        handle.update(routing())
        handle.close()


def test_threads_that_share_a_group() -> None:
    """They wait for each other; handles dropped meanwhile are destroyed later."""
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.Group(comm, **settings()) as group:

        def work() -> None:
            counts = np.zeros(2, np.int32)
            received = np.zeros((2, 4, 4), np.float32)
            for _ in range(50):
                handle = group.create_handle(ep.Layout.EXPERT_MAJOR, routing())
                tokens = np.ones((2, 4), np.float32)
                handle.dispatch(tokens, received, layout_info=ep.LayoutInfo(expert_counters=counts))
                assert counts[0] == 2

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_an_absent_rank_is_named() -> None:
    def program(comm: ep.Communicator) -> str:
        group = ep.Group(comm, **settings(timeout_ns=50_000_000))  # only the other rank is waited for
        text = ""
        if comm.rank == 0:
            handle = group.create_handle(ep.Layout.EXPERT_MAJOR, routing())
            info = ep.LayoutInfo(expert_counters=np.zeros(1, np.int32))
            with pytest.raises(ep.RemoteError) as failure:
                handle.dispatch(np.ones((2, 4), np.float32), np.zeros((1, 8, 4), np.float32), layout_info=info)
            text = str(failure.value)
            found = group.diagnosis()
            assert found is not None
            assert (found.rank, found.peer, found.operation) == (0, 1, "dispatch")
            handle.close()
        else:
            group.create_handle(ep.Layout.EXPERT_MAJOR, routing())
        group.close()
        return text

    previous = os.environ.pop("NCCL_EP_TIMEOUT_MS", None)
    try:
        assert "timed out" in ep.run_threads(2, program)[0]
    finally:
        if previous is not None:
            os.environ["NCCL_EP_TIMEOUT_MS"] = previous


def test_a_program_that_raises_is_reported() -> None:
    def program(comm: ep.Communicator) -> None:
        if comm.rank == 1:
            raise LookupError("rank 1 has no data")
        comm.barrier()

    begin = time.monotonic()
    with pytest.raises(LookupError, match="rank 1 has no data"):
        ep.run_threads(3, program)
    assert time.monotonic() - begin < 30, "the others waited for it until their timeout"
    assert ep.run_threads(2, lambda comm: comm.all_gather(b"x")) == [[b"x", b"x"]] * 2
