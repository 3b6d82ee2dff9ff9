# SPDX-License-Identifier: Apache-2.0
"""Groups that grow: a larger one replaces the old one when a call needs it; handles of the old one stay usable."""

from __future__ import annotations

from typing import Any

import torch

from crossdock._core import Group, Handle, Layout
from crossdock.deep_ep.checks import refuse_state, translated
from crossdock.deep_ep.ranks import Ranks
from crossdock.errors import Error

SPARE = 4  # handles that captures can have, since none can be made during one


def is_capturing() -> bool:
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


class PooledGroup:
    """A Group and its handles, which are reused when nothing refers to their last dispatch any more.

    Handles of captured calls are used by captured calls alone: replays use their memory at any time between eager
    calls, but whatever is captured with one of them is replayed in the order of its capture.
    """

    def __init__(self, ranks: Ranks, device: torch.device, layout: Layout, call: str, **fields: Any) -> None:
        """Collective. call: the one that needs it, for messages; fields: of the group."""
        if is_capturing():
            message = f"the first call with {call} makes memory, which cannot be captured"
            refuse_state(f"{message}: make one such call before")
        try:
            self.group = Group(ranks.communicator(device), **fields)
        except Error as error:
            raise translated(error) from error
        self.is_cpu = self.group.is_cpu
        self.is_closed = False
        self._layout = layout
        self.max_tokens: int = fields["max_dispatch_tokens_per_rank"]
        self.row_bytes: int = fields["max_token_bytes"]
        self.topk = 0  # for the owner
        # By top-k: of eager calls, and of captured ones.
        self._free: dict[int, list[Handle]] = {}
        self._free_captured: dict[int, list[Handle]] = {}
        self._resources = ranks.resources  # outlive a buffer that is not destroyed
        self._resources.groups.append(self.group)

    def take(self, num_topk: int) -> tuple[Handle, list[Handle]]:
        """A handle, and the list that it goes back to."""
        free = self.free(num_topk)
        if not self.is_cpu and torch.cuda.is_current_stream_capturing():
            captured = self._free_captured[num_topk]
            found = _pop(captured) or _pop(free)
            if found is None:
                refuse_state(
                    "more dispatches are open at once than could be foreseen, in a capture, where no handle can be "
                    "made: have as many open in calls before the capture"
                )
            return found, captured
        return _pop(free) or self.group.init_handle(self._layout, num_topk), free

    def free(self, num_topk: int) -> list[Handle]:
        """Unused handles of eager calls."""
        if num_topk not in self._free:
            spare = 0 if self.is_cpu or is_capturing() else SPARE
            self._free_captured[num_topk] = [self.group.init_handle(self._layout, num_topk) for _ in range(spare)]
        return self._free.setdefault(num_topk, [])

    def close(self) -> None:
        """Collective."""
        self._resources.groups.remove(self.group)
        self.is_closed = True
        for free in (*self._free.values(), *self._free_captured.values()):
            free.clear()
        self.group.close()


def _pop(handles: list[Handle]) -> Handle | None:
    try:  # threads may share a pool
        return handles.pop()
    except IndexError:
        return None
