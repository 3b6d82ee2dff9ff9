# SPDX-License-Identifier: Apache-2.0
"""What wrong calls raise: a sentence, as an exception that is an AssertionError, too, as DeepEP's callers know them."""

from __future__ import annotations

from crossdock.errors import InvalidArgument, InvalidUsage


class WrongArgument(InvalidArgument, AssertionError):
    """An argument is malformed or out of range; a ValueError and an AssertionError."""


class WrongCall(InvalidUsage, AssertionError):
    """The arguments are fine, but not here or not now; a RuntimeError and an AssertionError."""


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise WrongArgument(sentence)


def require_state(holds: bool, sentence: str) -> None:
    if not holds:
        raise WrongCall(sentence)
