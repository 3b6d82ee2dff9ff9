# SPDX-License-Identifier: Apache-2.0
"""Device memory hooks as Python functions: C-callable types for the addresses that AllocConfig takes.

    @crossdock.AllocFn
    def allocate(pointer, size, context):       # writes pointer[0]; returns 0, or a cudaError_t
        ...

    crossdock.AllocConfig(alloc_fn=crossdock.address_of(allocate), free_fn=crossdock.address_of(free))

The decorated functions must live as long as the groups that were given their addresses. If allocate raises, the call
that needed the memory fails with an UnhandledCudaError of that cause; Ctrl-C, MemoryError and the like come out of the
call as they are. What free raises is reported (sys.unraisablehook).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from crossdock import errors

_Alloc: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_void_p)
FreeFn: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
FreeFn.__doc__ = "ncclEpFreeFn_t: decorates free(pointer, context)."
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


def AllocFn(allocate: Callable[[Any, int, Any], int]) -> Any:
    """ncclEpAllocFn_t: decorates allocate(pointer, size, context), which writes pointer[0]."""

    def hook(*arguments: Any) -> int:
        try:
            return allocate(*arguments)
        except BaseException as failure:
            errors.keep_cause(failure)  # C has no exceptions
            return _OUT_OF_MEMORY

    return _Alloc(hook)


def address_of(function: Any) -> int:
    """The address of a decorated function, or of one of a ctypes library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
