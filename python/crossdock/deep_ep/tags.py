# SPDX-License-Identifier: Apache-2.0
"""A call's tag (crossdockHandleSetTag): one number for what must be the same on all ranks but the library cannot see.

Rows of any type and length go as bytes in whole units, so that rows of different types and lengths may look alike.
Kernels compare tags on entry, so this costs no exchange. Rows that go as they are, without scales, have tag 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from crossdock.deep_ep.rows import CARRIED_TYPES, UNIT
from crossdock.errors import Error

_ROW_BYTES = f"the bytes of a row of x modulo {UNIT}"
_TYPES = (*CARRIED_TYPES, torch.int32, torch.int16)  # of x, where rows go as bytes
_SCALES = {torch.float32: 1, torch.int32: 2}
# The name, lowest bit and values of each part of a tag.
_Part = tuple[str, int, Sequence[object]]
_OF_DISPATCH: tuple[_Part, ...] = (
    (_ROW_BYTES, 0, range(16)),
    ("the type of x", 4, ("one that goes as such", *_TYPES, *["another"] * (15 - len(_TYPES)))),
    ("the type of the scales of x", 8, ("None", "torch.float32", "torch.int32", "another")),
)
_OF_COMBINE: tuple[_Part, ...] = ((_ROW_BYTES, 0, range(16)), ("topk_weights", 4, ("None", "given")))
_FOUND = re.compile(r"the tag \(crossdockHandleSetTag\) is (\d+) on rank (\d+), (\d+) on rank (\d+)")
_SMS = "the number of SMs (crossdockHandleSetSms)"
_BUDGETS = ("whose max_recv_tokens_per_rank is", "whose tensor in")

_WEIGHTS = 1 << 4


def of_dispatch(x: torch.Tensor, scales: torch.Tensor | None, is_as_given: bool) -> int:
    """is_as_given: x goes as it is, else as bytes."""
    tag = 0
    if not is_as_given:
        tag = x.shape[1] * x.element_size() % UNIT
        if tag != 0 or x.dtype not in CARRIED_TYPES:
            tag |= (_TYPES.index(x.dtype) if x.dtype in _TYPES else len(_TYPES)) + 1 << 4
    return tag if scales is None else tag | _SCALES.get(scales.dtype, 3) << 8


def of_combine(x: torch.Tensor, has_weights: bool) -> int:
    """has_weights: topk_weights return in a combine of their own."""
    return x.shape[1] * x.element_size() % UNIT | (_WEIGHTS if has_weights else 0)


def explained(error: Error) -> Error:
    """The error with names and values in place of tags."""
    text = str(error).replace(_SMS, "num_sms")
    if any(words in text for words in _BUDGETS):
        text += "; here that is num_worst_tokens"
    found = _FOUND.search(text)
    if found is not None:
        tag, rank, other, peer = map(int, found.groups())
        parts = _OF_COMBINE if "combine" in text else _OF_DISPATCH
        ours, theirs = _values(tag, parts), _values(other, parts)
        differ = [name for name in ours if ours[name] != theirs[name]]
        names = [f"{name} is {ours[name]} on rank {rank}, {theirs[name]} on rank {peer}" for name in differ]
        text = text.replace(found[0], "; ".join(names) or found[0])
    return type(error)(text)


def _values(tag: int, parts: tuple[_Part, ...]) -> dict[str, object]:
    return {name: values[(tag >> first) % len(values)] for name, first, values in parts}
