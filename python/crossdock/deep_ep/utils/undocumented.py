# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for helpers of DeepEP's own tests that no document describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def stand_in(module: str, name: str) -> Callable[..., NoReturn]:
    """A function that can be imported, and raises NotImplementedError when it is called. AttributeError for names that
    Python itself looks up."""
    if name.startswith("__"):
        raise AttributeError(f"module 'deep_ep.utils.{module}' has no attribute '{name}'")

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"deep_ep.utils.{module}.{name}: Crossdock does not have this helper of DeepEP's tests. Its arguments and "
            "its result are not documented; define it in the test, or leave out what needs it"
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
