# SPDX-License-Identifier: Apache-2.0
"""Exceptions: one class per result code; the text is the library's message."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping


class Error(Exception):
    """A call failed. `code` is the ncclResult_t; str() names the argument or rank, its value, and what is allowed."""

    code: int = 3

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class UnhandledCudaError(Error, RuntimeError):
    """A CUDA call or an allocator hook failed."""

    code = 1


class SystemFailure(Error, OSError):
    """The operating system refused memory or a file."""

    code = 2


class InternalError(Error, RuntimeError):
    """A bug of the library; please report the message."""

    code = 3


class InvalidArgument(Error, ValueError):
    """An argument is malformed or out of range."""

    code = 4


class InvalidUsage(Error, RuntimeError):
    """Each argument is valid, but not in this state or combination."""

    code = 5


class NotCopyable(InvalidUsage, TypeError):
    """copy, pickle or torch.save of an object that belongs to this process and its peers; the text says what to do."""


class RemoteError(Error, ConnectionError):
    """A rank did not join or answer in time; the group has failed."""

    code = 6


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the block have the names of its caller's arguments (the values) for those of the library (the keys)."""
    try:
        yield
    except Error as error:
        text = str(error)
        for name, of_caller in names.items():
            text = text.replace(name, of_caller)
        raise type(error)(text, error.code) from None


_BY_CODE: dict[int, type[Error]] = {
    kind.code: kind
    for kind in (UnhandledCudaError, SystemFailure, InternalError, InvalidArgument, InvalidUsage, RemoteError)
}


class _Causes(threading.local):
    latest: BaseException | None = None


_causes = _Causes()


def keep_cause(failure: BaseException) -> None:
    """What a caller's function raised, which C called and which makes the call of this thread fail."""
    _causes.latest = failure


def error_of(code: int, message: str) -> Error:
    """The exception of a failed call; codes of NCCL that have no class of their own become an Error.

    Raises the cause instead if that is nothing about the call: MemoryError, or no Exception.
    """
    error = _BY_CODE.get(code, Error)(message, code)
    cause, _causes.latest = _causes.latest, None
    if cause is not None and (isinstance(cause, MemoryError) or not isinstance(cause, Exception)):
        raise cause
    error.__cause__ = cause
    return error
