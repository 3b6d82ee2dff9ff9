# SPDX-License-Identifier: Apache-2.0
"""Tuples some of whose items are made when somebody looks at them: handles have items that almost nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Later:
    """An item to be made by a function, once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: list[Any] = []

    def get(self) -> Any:
        if not self._made:
            self._made.append(self._make())
        return self._made[0]


def _made(item: Any) -> Any:
    return item.get() if isinstance(item, Later) else item


class LazyTuple(tuple[Any, ...]):
    def __iter__(self) -> Iterator[Any]:
        return map(_made, super().__iter__())

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return tuple(map(_made, found)) if isinstance(index, slice) else _made(found)

    def raw(self) -> Iterator[Any]:
        """The items without making any."""
        return super().__iter__()
