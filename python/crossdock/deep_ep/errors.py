# SPDX-License-Identifier: Apache-2.0
"""What wrong calls raise: a message, as an exception that is an AssertionError, too, as DeepEP's callers know them."""

from __future__ import annotations

from collections.abc import Callable

from crossdock.errors import Error, InvalidArgument, InvalidUsage


class WrongArgument(InvalidArgument, AssertionError):
    """An argument is malformed or out of range; a ValueError and an AssertionError."""


class WrongCall(InvalidUsage, AssertionError):
    """The arguments are fine, but not here or not now; a RuntimeError and an AssertionError."""


# A message with values in it is a function, so that right calls do not pay for it.
Message = str | Callable[[], str]


def require(holds: bool, message: Message) -> None:
    if not holds:
        raise WrongArgument(message if isinstance(message, str) else message())


def require_state(holds: bool, message: Message) -> None:
    if not holds:
        raise WrongCall(message if isinstance(message, str) else message())


def translated(error: Error) -> Error:
    """What the library refused, as the exception that callers of DeepEP's classes know; else the error itself."""
    if isinstance(error, AssertionError):
        return error
    if isinstance(error, InvalidArgument):
        return WrongArgument(str(error))
    return WrongCall(str(error)) if isinstance(error, InvalidUsage) else error
