# SPDX-License-Identifier: Apache-2.0
"""Tensors that peers access directly."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch

from crossdock import _core, nccl
from crossdock.copies import Shared
from crossdock.errors import Error, InvalidArgument, InvalidUsage

ALIGNMENT = 256  # bytes, of every tensor's start


def _checked(shape: Sequence[Any], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape's extents; InvalidArgument, if it or dtype is none."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype is {dtype!r}, expected a torch.dtype")
    try:
        extents = tuple(int(operator.index(extent)) for extent in shape)
    except TypeError:
        raise InvalidArgument(f"shape is {shape!r}, allowed: whole numbers") from None
    if any(extent < 0 for extent in extents):
        raise InvalidArgument(f"shape is {list(shape)}, allowed: extents of 0 and more")
    return extents


class SymmetricMemory(Shared):
    """Memory of the same size on every rank, registered as one window. empty() makes tensors in it.

    Making it and closing it are collective.
    If a dispatch receives into of(tensor), peers write their rows into the tensor, without a staging copy. This holds
    in rank-major low latency and in flat high throughput. Do not touch such a tensor from the moment when any rank may
    start the operation until it is complete.
    If a high-throughput dispatch sends from of(tensor), and its outputs are expert-major or not in windows, peers read
    their rows there. All ranks should have the tensor at the same place. It may change when the dispatch is complete.
    """

    _remedy = "make it anew in each process: SymmetricMemory(communicator, num_bytes)"

    def __init__(self, comm: _core.Communicator, num_bytes: int) -> None:
        if not isinstance(num_bytes, numbers.Integral) or num_bytes < 1:
            raise InvalidArgument(f"num_bytes is {num_bytes!r}, allowed: 1 and more")
        self._comm = comm
        self._used = 0
        self._memory: Any
        self._window: Any
        if comm.is_cpu:
            self._memory = _core.Memory(num_bytes)
            self._window = comm.register_window(self._memory)
        else:
            self._memory = nccl.Memory(num_bytes)
            self._window = nccl.register_window(comm, self._memory)
        with torch.inference_mode(False):  # its parts serve in all modes of autograd
            if comm.is_cpu:
                self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
            else:
                self._bytes = torch.as_tensor(self._memory, dtype=torch.uint8, device="cuda").zero_()
        if not comm.is_cpu:
            torch.cuda.synchronize()

    @staticmethod
    def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes that empty() takes for a tensor."""
        return -(-math.prod(_checked(shape, dtype)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the next part of the memory as a tensor, initially zero.

        The size is given as to torch.empty: empty(2, 3) or empty((2, 3)).
        All ranks make the same tensors in the same order.
        After close() it stays valid, as ordinary memory. InvalidArgument: not enough memory is left.
        """
        self._expect_open()
        shape = _checked(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size, dtype)
        num_bytes, taken = math.prod(shape) * dtype.itemsize, self.bytes_of(shape, dtype)
        left = max(0, len(self._bytes) - self._used)
        if num_bytes > left:
            raise InvalidArgument(
                f"shape is {list(shape)} of {dtype}, {num_bytes} bytes; {left} of the "
                f"memory's {len(self._bytes)} bytes are left"
            )
        with torch.inference_mode(False):
            begin = min(self._used, len(self._bytes))
            piece = self._bytes[begin : begin + num_bytes].view(dtype).view(shape)
        self._used += taken
        return piece

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all of the tensor lies in this memory."""
        offset = tensor.data_ptr() - self._bytes.data_ptr()
        return 0 <= offset and offset + tensor.nbytes <= len(self._bytes) and tensor.device == self._bytes.device

    def of(self, tensor: torch.Tensor) -> _core.Tensor:
        """The tensor with its window, to pass to a call; also for views of tensors in this memory."""
        self._expect_open()
        if not isinstance(tensor, torch.Tensor) or not self.holds(tensor):
            raise InvalidArgument("tensor does not lie in this memory: make it with empty()")
        offset = tensor.data_ptr() - self._bytes.data_ptr()
        return _core.Tensor(tensor.detach(), window=self._window, window_offset=offset)

    def _expect_open(self) -> None:
        if self._window is None:
            raise InvalidUsage("the symmetric memory is closed")

    def close(self) -> None:
        """Deregisters the window, before the communicator is closed. Collective. Repeating it is fine."""
        if self._window is None:
            return
        if self._comm.is_cpu:
            self._window.close()
        else:
            torch.cuda.synchronize()
            nccl.deregister_window(self._comm, self._window)
        self._window = None

    def __enter__(self) -> SymmetricMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except Error:
            if kind is None:  # else what happened in the block is what is reported
                raise
