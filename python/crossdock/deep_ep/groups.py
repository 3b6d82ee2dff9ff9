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


class PooledGroup:
    """A Group and its handles, which are used again once nobody knows what they last served."""

    def __init__(self, comm: Communicator, layout: Layout, **fields: Any) -> None:
        self.group = Group(comm, **fields)
        self._layout = layout
        self._free: dict[int, list[Handle]] = {}
        self._captured: list[Handle] = []
        self._abandon = weakref.finalize(self, _abandoned.append, self.group)

    def lease(self, num_topk: int) -> Lease:
        free = self._free.setdefault(num_topk, [])
        return Lease(self, num_topk, free.pop() if free else self.group.init_handle(self._layout, num_topk))

    def take_back(self, handle: Handle, num_topk: int, is_captured: bool) -> None:
        if is_captured:  # replays use its memory at any time
            self._captured.append(handle)
        else:
            self._free[num_topk].append(handle)

    def close(self) -> None:
        """Collective."""
        self._abandon.detach()
        self._free.clear()
        self.group.close()


class Lease:
    """A handle that serves one dispatch and all that follows from it, given back when this object goes."""

    def __init__(self, pool: PooledGroup, num_topk: int, handle: Handle) -> None:
        self._pool, self._num_topk = pool, num_topk
        self._handle = handle
        self.is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @property
    def handle(self) -> Handle:
        require_state(not self._pool.group.is_closed, "the buffer of this handle is destroyed")
        return self._handle

    def forget(self) -> None:
        """Lets go of tensors that finished calls have used; torch knows by streams when their memory is free."""
        self._handle.forget_arrays()

    def __del__(self) -> None:
        if hasattr(self, "is_captured") and not self._pool.group.is_closed:
            self._pool.take_back(self._handle, self._num_topk, self.is_captured)
