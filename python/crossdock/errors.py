# SPDX-License-Identifier: Apache-2.0
"""Exceptions: a class for each code of the library, whose text is the library's message."""

from __future__ import annotations


class Error(Exception):
    """A call failed. `code` is the ncclResult_t; str() says which argument or rank, its value, and what is allowed."""

    code: int = 3

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class UnhandledCudaError(Error, RuntimeError):
    """CUDA, or an allocator hook, refused something."""

    code = 1


class SystemFailure(Error, OSError):
    """The system refused something: memory, files."""

    code = 2


class InternalError(Error, RuntimeError):
    """A mistake of the library; please report the message."""

    code = 3


class InvalidArgument(Error, ValueError):
    """An argument is malformed or out of range."""

    code = 4


class InvalidUsage(Error, RuntimeError):
    """Each argument is fine, but not here or not now."""

    code = 5


class RemoteError(Error, ConnectionError):
    """A rank did not come, or did not answer in time; the group is over."""

    code = 6


_BY_CODE: dict[int, type[Error]] = {
    kind.code: kind
    for kind in (UnhandledCudaError, SystemFailure, InternalError, InvalidArgument, InvalidUsage, RemoteError)
}


def error_of(code: int, message: str) -> Error:
    """The exception of a failed call; codes of NCCL that have no class of their own become an Error."""
    return _BY_CODE.get(code, Error)(message, code)
