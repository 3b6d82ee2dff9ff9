# SPDX-License-Identifier: Apache-2.0
"""Exceptions of wrong calls: also AssertionErrors, as DeepEP's callers expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from crossdock.errors import Error, InvalidArgument, InvalidUsage


class WrongArgument(InvalidArgument, AssertionError):
    """An argument is malformed or out of range; a ValueError and an AssertionError."""


class WrongCall(InvalidUsage, AssertionError):
    """The arguments are valid, but not in this state; a RuntimeError and an AssertionError."""


# A message with values in it is a function, so that valid calls do not format it.
Message = str | Callable[[], str]


def require(holds: bool, message: Message) -> None:
    if not holds:
        raise WrongArgument(message if isinstance(message, str) else message())


def refuse(message: str) -> NoReturn:
    raise WrongArgument(message)


def refuse_state(message: str) -> NoReturn:
    raise WrongCall(message)


def require_state(holds: bool, message: Message) -> None:
    if not holds:
        raise WrongCall(message if isinstance(message, str) else message())


def translated(error: Error) -> Error:
    """The library's error as the exception that DeepEP's callers expect, or else the error itself."""
    if isinstance(error, InvalidArgument):
        return WrongArgument(str(error))
    return WrongCall(str(error)) if isinstance(error, InvalidUsage) else error
