# SPDX-License-Identifier: Apache-2.0
"""NCCL communicators and windows without another Python package.

Uses the same library as Crossdock: the NCCL that the process has loaded, or else CROSSDOCK_NCCL_LIBRARY, or else the
libnccl.so.2 that the loader finds.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

from crossdock._core import Communicator
from crossdock.copies import Uncopied
from crossdock.errors import InvalidArgument, InvalidUsage, error_of
from crossdock.launcher import plugin
from crossdock.launcher.libraries import NCCL_PACKAGE, find_nccl, version_text
from crossdock.launcher.loaded import file_of

ID_BYTES = 128
MIN_VERSION = 23004  # 2.30.4, the first with all that the library needs
_NAME = "libnccl.so.2"
_WINDOW_DEFAULT = 0


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]


def _open() -> ctypes.CDLL:
    global_symbols = ctypes.CDLL(None)
    if hasattr(global_symbols, "ncclGetVersion"):
        return global_symbols
    try:
        return ctypes.CDLL(_NAME, mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)
    except OSError:
        pass
    name = os.environ.get("CROSSDOCK_NCCL_LIBRARY") or _NAME
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise InvalidUsage(f"NCCL cannot be loaded: {error}; set CROSSDOCK_NCCL_LIBRARY to {_NAME}") from error


@cache
def _found() -> tuple[ctypes.CDLL, int, str]:
    """The library, its version code and its file."""
    library = _open()
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return library, number.value, file_of(library.ncclGetVersion)


def _too_old(code: int, name: str) -> str:
    """Names a file that is new enough, if there is one."""
    other = find_nccl(os.environ, MIN_VERSION)
    remedy = f"pip install {NCCL_PACKAGE}" if other.problem else f"{other.file} is {other.version}"
    return (
        f"NCCL {version_text(code)} ({name}) is too old, {version_text(MIN_VERSION)} or newer is needed: {remedy}, and "
        "start the program with python -m crossdock run, which loads that first"
    )


@cache
def _library() -> ctypes.CDLL:
    """The library, if it is new enough for the functions declared here."""
    library, code, name = _found()
    if code < MIN_VERSION:
        raise InvalidUsage(_too_old(code, name))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), ctypes.c_int, _UniqueId, ctypes.c_int]
    library.ncclCommDestroy.argtypes = [pointer]
    library.ncclMemAlloc.argtypes = [ctypes.POINTER(pointer), size]
    library.ncclMemFree.argtypes = [pointer]
    library.ncclCommWindowRegister.argtypes = [pointer, pointer, size, ctypes.POINTER(pointer), ctypes.c_int]
    library.ncclCommWindowDeregister.argtypes = [pointer, pointer]
    return library


def _check(result: int, what: str) -> None:
    if result != 0:
        raise error_of(result, f"{what} failed: {_library().ncclGetErrorString(result).decode()}")


def version() -> str:
    """NCCL's version, e.g. "2.30.7", even if it is too old."""
    return version_text(_found()[1])


def offer_plugin() -> None:
    """Names the package's network plugin to NCCL, where kernels would have no network without it
    (crossdock.launcher.plugin). For communicators that are made later."""
    plugin.offer(_found()[1])


def is_new_enough() -> bool:
    return _found()[1] >= MIN_VERSION


def check_version() -> None:
    """Raises InvalidUsage, naming the loaded file, unless NCCL is new enough."""
    _library()


def file() -> str:
    """The file that NCCL was loaded from."""
    return _found()[2]


def unique_id() -> bytes:
    """ID_BYTES bytes that one process makes and passes to the others, for join."""
    unique = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
    return ctypes.string_at(ctypes.byref(unique), ID_BYTES)


def join(num_ranks: int, rank: int, unique: bytes) -> Communicator:
    """A communicator of num_ranks processes, or threads, on the current CUDA devices. Collective.

    It belongs to NCCL, and lives until destroy is called or the process ends.
    """
    if len(unique) != ID_BYTES:
        raise InvalidArgument(f"unique has {len(unique)} bytes, expected {ID_BYTES}: pass what unique_id() returned")
    offer_plugin()
    comm = ctypes.c_void_p()
    identity = _UniqueId.from_buffer_copy(unique)
    _check(_library().ncclCommInitRank(ctypes.byref(comm), num_ranks, identity, rank), "ncclCommInitRank")
    return Communicator.adopt(comm.value or 0)


def destroy(communicator: Communicator) -> None:
    """Frees a communicator of join. InvalidUsage while it has open groups; its windows must be closed, too."""
    communicator.close()
    _check(_library().ncclCommDestroy(communicator.ptr), "ncclCommDestroy")


class Memory(Uncopied):
    """Bytes on the current CUDA device that can be registered as a window: torch.as_tensor(memory) is a uint8 tensor.

    Freed when the last tensor over it is gone.
    """

    _remedy = "make another Memory and copy its tensor"

    def __init__(self, size: int) -> None:
        memory = ctypes.c_void_p()
        _check(_library().ncclMemAlloc(ctypes.byref(memory), size), f"ncclMemAlloc of {size} bytes")
        self.address, self.size = memory.value or 0, size

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __del__(self) -> None:
        if getattr(self, "address", 0) and _library is not None:
            _library().ncclMemFree(self.address)


def register_window(communicator: Communicator, memory: Memory) -> int:
    """The ncclWindow_t of a Memory that all ranks register together; collective, the same size everywhere."""
    window = ctypes.c_void_p()
    result = _library().ncclCommWindowRegister(
        communicator.ptr, memory.address, memory.size, ctypes.byref(window), _WINDOW_DEFAULT
    )
    _check(result, "ncclCommWindowRegister")
    if not window.value:
        raise InvalidUsage("ncclCommWindowRegister gave no window: NCCL has no symmetric memory for this communicator")
    return window.value


def deregister_window(communicator: Communicator, window: int) -> None:
    """Deregisters a window, before its memory is freed. Collective."""
    _check(_library().ncclCommWindowDeregister(communicator.ptr, window), "ncclCommWindowDeregister")
