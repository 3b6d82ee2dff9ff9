# SPDX-License-Identifier: Apache-2.0
"""NCCL communicators without another Python package: the library that the process has loaded, or libnccl.so.2."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from crossdock._core import Communicator
from crossdock.errors import Error, InvalidArgument, InvalidUsage

ID_BYTES = 128


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]


@cache
def _library() -> ctypes.CDLL:
    """CROSSDOCK_NCCL_LIBRARY, or the libnccl.so.2 that is loaded already or that the loader finds."""
    name = os.environ.get("CROSSDOCK_NCCL_LIBRARY") or "libnccl.so.2"
    try:
        library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise InvalidUsage(f"NCCL cannot be loaded: {error}; set CROSSDOCK_NCCL_LIBRARY to libnccl.so.2") from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int]
    library.ncclCommDestroy.argtypes = [ctypes.c_void_p]
    return library


def _check(result: int, what: str) -> None:
    if result != 0:
        raise Error(f"{what} failed: {_library().ncclGetErrorString(result).decode()}", result)


def version() -> str:
    """NCCL's version, e.g. "2.30.7"."""
    number = ctypes.c_int()
    _check(_library().ncclGetVersion(ctypes.byref(number)), "ncclGetVersion")
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def unique_id() -> bytes:
    """ID_BYTES bytes that one process makes and hands to the others, for join."""
    unique = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
    return ctypes.string_at(ctypes.byref(unique), ID_BYTES)


def join(num_ranks: int, rank: int, unique: bytes) -> Communicator:
    """A communicator of num_ranks processes, or threads, on the current CUDA devices. Collective.

    It is NCCL's, and lives until destroy is called or the process ends.
    """
    if len(unique) != ID_BYTES:
        raise InvalidArgument(f"unique has {len(unique)} bytes, expected {ID_BYTES}: pass what unique_id() returned")
    comm = ctypes.c_void_p()
    identity = _UniqueId.from_buffer_copy(unique)
    _check(_library().ncclCommInitRank(ctypes.byref(comm), num_ranks, identity, rank), "ncclCommInitRank")
    return Communicator.adopt(comm.value or 0)


def destroy(communicator: Communicator) -> None:
    """Frees a communicator of join; its groups must be closed."""
    _check(_library().ncclCommDestroy(communicator.ptr), "ncclCommDestroy")
