# SPDX-License-Identifier: Apache-2.0
"""Groups that grow: made anew, larger, when a call needs more, while handles of the old ones stay usable."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from crossdock._core import Communicator, Group, Handle, Layout
from crossdock.deep_ep.errors import require_state

# What nobody closed: peers may still write there, and whoever drops a buffer must not wait for them.
_abandoned: list[Group] = []


SPARE = 4  # handles that captures can have, since none can be made during one


def is_capturing() -> bool:
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


class PooledGroup:
    """A Group and its handles, which are used again once nobody knows what they last served.

    Handles of captured calls are used by captured calls alone: replays use their memory at any time between eager
    calls, but whatever is captured with one of them is replayed in the order of its capture.
    """

    def __init__(self, comm: Communicator, layout: Layout, **fields: Any) -> None:
        self.group = Group(comm, **fields)
        self._layout = layout
        self._free: dict[tuple[int, bool], list[Handle]] = {}  # by top-k, and whether captured calls use them
        self._abandon = weakref.finalize(self, _abandoned.append, self.group)

    def lease(self, num_topk: int) -> Lease:
        captured = is_capturing()
        free = self._free_of(num_topk, captured)
        if not free and captured:
            free = self._free_of(num_topk, False)
            require_state(
                len(free) > 0,
                "more dispatches are open at once than could be foreseen, in a capture, where no handle can be made: "
                "have as many open in calls before the capture",
            )
        handle = free.pop() if free else self.group.init_handle(self._layout, num_topk)
        return Lease(self, num_topk, handle, captured)

    def _free_of(self, num_topk: int, captured: bool) -> list[Handle]:
        if (num_topk, False) not in self._free:
            spare = 0 if self.group.is_cpu or is_capturing() else SPARE
            self._free[num_topk, False] = []
            self._free[num_topk, True] = [self.group.init_handle(self._layout, num_topk) for _ in range(spare)]
        return self._free[num_topk, captured]

    def take_back(self, handle: Handle, num_topk: int, captured: bool) -> None:
        self._free[num_topk, captured].append(handle)

    def close(self) -> None:
        """Collective."""
        self._abandon.detach()
        self._free.clear()
        self.group.close()


class Lease:
    """A handle that serves one dispatch and all that follows from it, given back when this object goes."""

    def __init__(self, pool: PooledGroup, num_topk: int, handle: Handle, captured: bool) -> None:
        self._pool, self._num_topk, self._captured = pool, num_topk, captured
        self._handle = handle
        self.is_pending = False  # the receive half is missing

    @property
    def handle(self) -> Handle:
        require_state(not self._pool.group.is_closed, "the buffer of this handle is destroyed")
        return self._handle

    def forget(self) -> None:
        """Lets go of tensors that finished calls have used; torch knows by streams when their memory is free."""
        self._handle.forget_arrays()

    def __del__(self) -> None:
        # One whose hook was never called goes for good, and with it the operation that is under way.
        if hasattr(self, "is_pending") and not self.is_pending and not self._pool.group.is_closed:
            self._pool.take_back(self._handle, self._num_topk, self._captured)
