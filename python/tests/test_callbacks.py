# SPDX-License-Identifier: Apache-2.0
"""Python code of callers that a call enters: what it raises about the call becomes the library's error, and Ctrl-C, the
end of the program and a lack of memory pass through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossdock as ep

GROUP = {"num_experts": 2, "max_dispatch_tokens_per_rank": 4, "max_token_bytes": 64}


class OfTheProgram(BaseException):
    """No Exception."""


class Attributes:
    """Every one of the names raises; others do not exist."""

    def __init__(self, failure: BaseException, *names: str) -> None:
        self._failure, self._names = failure, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise self._failure
        raise AttributeError(name)


def raising(failure: BaseException, *methods: str, base: type = object) -> Any:
    """An object whose methods raise."""

    def method(*arguments: Any, **fields: Any) -> Any:
        raise failure

    return type("Raising", (base,), dict.fromkeys(methods, method))()


def interface(**changes: Any) -> Any:
    fields = {"shape": (2, 4), "typestr": "<f4", "data": (4096, False), "version": 3} | changes
    return type("Described", (), {"__cuda_array_interface__": fields})()


class RefusesVersions:
    """An exporter that knows none, and then raises."""

    def __init__(self, failure: BaseException) -> None:
        self.failure = failure

    def __dlpack__(self) -> Any:
        raise self.failure


def group_of(**fields: Any) -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.Group(comm, **GROUP, **fields):
        pass


def group_with_hooks(failure: BaseException) -> None:
    """Its first allocation raises."""

    @ep.AllocFn  # type: ignore[untyped-decorator,unused-ignore]
    def allocate(pointer: Any, size: int, context: Any) -> int:
        raise failure

    @ep.FreeFn  # type: ignore[untyped-decorator,unused-ignore]
    def free(pointer: Any, context: Any) -> int:
        return 0

    group_of(alloc=ep.AllocConfig(alloc_fn=ep.address_of(allocate), free_fn=ep.address_of(free)))


def mask_of(failure: BaseException) -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.Group(comm, **GROUP, enable_mask=True) as group:
        group.mask_update([raising(failure, "__bool__")])


def averager_of(names: Any) -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.A2sgd(comm, [np.zeros(4, np.float32)], names=names):
        pass


ARRAY = np.zeros(4, np.uint8)
CALLS: dict[str, Callable[[BaseException], Any]] = {
    "__dlpack__": lambda failure: ep.Tensor(raising(failure, "__dlpack__")),
    "__dlpack__ without versions": lambda failure: ep.Tensor(RefusesVersions(failure)),
    "a property __dlpack__": lambda failure: ep.Tensor(Attributes(failure, "__dlpack__")),
    "__cuda_array_interface__": lambda failure: ep.Tensor(Attributes(failure, "__cuda_array_interface__")),
    "__array_interface__": lambda failure: ep.Tensor(Attributes(failure, "__array_interface__")),
    "a shape's items": lambda failure: ep.Tensor(interface(shape=raising(failure, "__iter__", "__getitem__"))),
    "an extent": lambda failure: ep.Tensor(interface(shape=(raising(failure, "__index__", "__int__"),))),
    "an address": lambda failure: ep.Tensor(interface(data=(raising(failure, "__index__", "__int__"), False))),
    "the text of a type": lambda failure: ep.Tensor(interface(typestr=raising(failure, "__str__"))),
    "the text of what is refused": lambda failure: ep.Tensor(interface(data=raising(failure, "__str__"))),
    "the name of a type": lambda failure: ep.Tensor(ARRAY, dtype=Attributes(failure, "name", "__name__")),
    "the shape of a Tensor": lambda failure: ep.Tensor(ARRAY, shape=raising(failure, "__iter__", "__getitem__")),
    "the extent of a Tensor": lambda failure: ep.Tensor(ARRAY, shape=(raising(failure, "__index__", "__int__"),)),
    "a window's handle": lambda failure: ep.Tensor(ARRAY, window=Attributes(failure, "handle")),
    "a communicator's address": lambda failure: ep.Communicator.adopt(Attributes(failure, "ptr")),
    "a flag": lambda failure: group_of(ht_masks=raising(failure, "__str__")),
    "a number": lambda failure: group_of(lsa_team_size=raising(failure, "__index__", "__int__")),
    "a mask": mask_of,
    "names": lambda failure: averager_of(raising(failure, "__iter__", "__getitem__")),
    "a hook": group_with_hooks,
}
if sys.version_info >= (3, 12):
    CALLS["__buffer__"] = lambda failure: ep.Tensor(raising(failure, "__buffer__"))


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, MemoryError, OfTheProgram])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_about_the_call_passes_through(name: str, failure: type[BaseException]) -> None:
    own = failure("of the caller")
    with pytest.raises(failure) as found:
        CALLS[name](own)
    assert found.value is own


@pytest.mark.parametrize("name", CALLS)
def test_what_is_about_the_call_is_the_librarys_error(name: str) -> None:
    own = ValueError("of the caller")
    with pytest.raises((ep.Error, ValueError)) as found:
        CALLS[name](own)
    if name == "a hook":
        assert isinstance(found.value, ep.UnhandledCudaError) and found.value.__cause__ is own
    elif name == "a mask":
        assert found.value is own
    else:
        assert isinstance(found.value, ep.InvalidArgument)
