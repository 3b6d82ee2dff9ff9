# SPDX-License-Identifier: Apache-2.0
"""torch's current streams, which are looked up on every call, without an object made each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from crossdock._core import current_stream_address

Result = TypeVar("Result")

_known: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and address


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream(index: int) -> torch.cuda.Stream:
    """Of a CUDA device; the same stream is the same object."""
    key = index, current_stream_address(index)
    stream = _known.get(key)
    if stream is None:
        stream = _known.setdefault(key, torch.cuda.current_stream(index))
    return stream


def run_on(stream: torch.cuda.Stream, work: Callable[[], Result]) -> Result:
    """What work returns, with that stream current meanwhile."""
    index = stream.device_index
    if torch.cuda.current_device() != index:
        with torch.cuda.stream(stream):
            return work()
    before = current_stream(index)
    torch.cuda.set_stream(stream)
    try:
        return work()
    finally:
        torch.cuda.set_stream(before)


def on_this_stream(device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    """The function, to be called later, on the stream of a CUDA device that is current now."""
    index = index_of(device)
    stream = current_stream(index)

    def hook() -> None:
        if current_stream(index) is stream:
            work()
        else:
            run_on(stream, work)

    return hook
