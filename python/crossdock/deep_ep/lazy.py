# SPDX-License-Identifier: Apache-2.0
"""Tuples some of whose items are made when somebody looks at them: handles have items that almost nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Later:
    """An item that a function makes of its tuple, at every look."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make


class LazyTuple(tuple[Any, ...]):
    def __iter__(self) -> Iterator[Any]:
        return map(self._made, super().__iter__())

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return tuple(map(self._made, found)) if isinstance(index, slice) else self._made(found)

    def _made(self, item: Any) -> Any:
        return item.make(self) if isinstance(item, Later) else item
