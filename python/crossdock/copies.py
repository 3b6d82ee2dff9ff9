# SPDX-License-Identifier: Apache-2.0
"""What copy, pickle, and all that stands on them (torch.save, multiprocessing) do with the package's objects.

Configurations and arguments are values: they are copied and pickled by their fields. What belongs to ranks in common
(communicators, groups, buffers, exchanges) is one thing however many objects use it, so a copy is the object itself,
also in a deep copy of a module that has one; no collective call is needed. What serves one dispatch, or memory that
peers know, has no copies. None of this can leave its process.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any, NoReturn, Self

from crossdock import _core
from crossdock.errors import NotCopyable


def _refuse(kind: type, remedy: str, action: str = "copied or pickled") -> NoReturn:
    raise NotCopyable(f"{kind.__name__} cannot be {action}, since it belongs to this process and its peers: {remedy}")


class Uncopied:
    """Base of classes whose objects can be neither copied nor pickled. remedy: what a user does instead."""

    __slots__ = ()
    _remedy: str

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(type(self), self._remedy)


class Shared:
    """Base of classes whose objects are their own copies, and cannot be pickled."""

    __slots__ = ()
    _remedy: str

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(type(self), self._remedy, "pickled")


def _made(kind: type, fields: dict[str, Any]) -> Any:
    return kind(**fields)


def _by_fields(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    kind = type(value)
    return _made, (
        kind,
        {name: getattr(value, name) for name, field in vars(kind).items() if isinstance(field, property)},
    )


def _of_hooks(value: _core.AllocConfig) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if value.alloc_fn or value.free_fn or value.context:
        _refuse(type(value), "its hooks are addresses here; set them where the group is made", "pickled")
    return _made, (type(value), {})


def _copied_hooks(value: _core.AllocConfig, memo: Any = None) -> Any:
    make, arguments = _by_fields(value)
    return make(*arguments)


_VALUES = (
    *(_core.GroupConfig, _core.HandleConfig, _core.DispatchConfig, _core.CombineConfig, _core.LayoutInfo),
    *(_core.DispatchInputs, _core.DispatchOutputs, _core.CombineInputs, _core.CombineOutputs),
)
_SHARED: dict[type, str] = {
    _core.Communicator: "make one in each process, of its process group (crossdock.torch.communicator_of) or with "
    "Communicator.join; run_processes gives each rank its own",
    _core.Group: "make it anew in each process: Group(communicator, ...)",
}
_UNCOPIED: dict[type, str] = {
    _core.Handle: "make another one with Group.init_handle",
    _core.Window: "register other memory with Communicator.register_window",
    _core.Memory: "make another Memory and copy its bytes, as with numpy.frombuffer",
    _core.Tensor: "make another one of the array",
    _core.A2sgd: "make it anew: A2sgd(communicator, pieces)",
}


def _refuser(remedy: str, action: str) -> Callable[[Any], NoReturn]:
    return lambda value: _refuse(type(value), remedy, action)


def install() -> None:
    """For the classes of C++."""
    for kind in _VALUES:
        copyreg.pickle(kind, _by_fields)
    copyreg.pickle(_core.AllocConfig, _of_hooks)
    for name in ("__copy__", "__deepcopy__"):
        setattr(_core.AllocConfig, name, _copied_hooks)
    for kind, remedy in _UNCOPIED.items():
        copyreg.pickle(kind, _refuser(remedy, "copied or pickled"))
    for kind, remedy in _SHARED.items():
        copyreg.pickle(kind, _refuser(remedy, "pickled"))
        setattr(kind, "__copy__", Shared.__copy__)
        setattr(kind, "__deepcopy__", Shared.__deepcopy__)
