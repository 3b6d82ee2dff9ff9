# SPDX-License-Identifier: Apache-2.0
"""What rows are beside what the library sees of them, and how ranks see that they differ.

Groups carry rows of the library's types, of whole units of bytes; others are padded, or go as bytes, and may then look
alike without being so. Hence each call has a tag (crossdockHandleSetTag), one number for what must be the same on all
ranks but the library cannot see: kernels compare it on entry.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from crossdock.deep_ep.checks import translated
from crossdock.deep_ep.config import align
from crossdock.errors import Error

UNIT = 16  # bytes
_TYPES = (
    *(torch.int8, torch.uint8, torch.float16, torch.float32, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.int32, torch.int16, *["another"] * 7),
)
_TYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_TYPES[:9])}
_SCALES = {torch.float32: 1, torch.int32: 2}

# The name, lowest bit and values of each part of a tag.
_Part = tuple[str, int, Sequence[object]]
_ROW_BYTES: _Part = (f"the bytes of a row of x modulo {UNIT}", 0, range(16))
_OF_DISPATCH: tuple[_Part, ...] = (
    _ROW_BYTES,
    ("the type of x", 4, _TYPES),
    ("the type of the scales of x", 8, ("None", "torch.float32", "torch.int32", "another")),
)
_OF_COMBINE: tuple[_Part, ...] = (_ROW_BYTES, ("topk_weights", 4, ("None", "given")))
_FOUND = re.compile(r"the tag \(crossdockHandleSetTag\) is (\d+) on rank (\d+), (\d+) on rank (\d+)")
_WEIGHTS = re.compile(r"whether topk_weights travel is (no|yes) on rank (\d+), (no|yes) on rank (\d+)")
_SMS = "the number of SMs (crossdockHandleSetSms)"
_SUMMED = "an invariant group combines expert-major rows"
_BUDGETS = ("whose max_recv_tokens_per_rank is", "whose tensor in")


def row_bytes_of(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.shape[1] * x.element_size()


def carried_bytes(x: torch.Tensor, beside: int) -> int:
    """Of a row of x with so many bytes of scales."""
    return align(row_bytes_of(x), UNIT) + align(beside, UNIT)


def bytes_either_way(x: torch.Tensor, beside: int) -> int:
    """The same, or those of a bf16 row that returns."""
    return max(carried_bytes(x, beside), align(2 * x.shape[1], UNIT))


def tag_of_dispatch(x: torch.Tensor, scales: torch.Tensor | None) -> int:
    of_scales = 0 if scales is None else _SCALES.get(scales.dtype, 3)
    return row_bytes_of(x) % UNIT | _TYPE_NUMBERS.get(x.dtype, len(_TYPE_NUMBERS)) << 4 | of_scales << 8


def tag_of_combine(x: torch.Tensor, weights_follow: bool) -> int:
    """weights_follow: topk_weights return in a combine of their own."""
    return row_bytes_of(x) % UNIT | weights_follow << 4


def explained(error: Error, budget_is: str) -> Error:
    """The library's error of an elastic operation with the names and values that callers know."""
    text = str(error).replace(_SMS, "num_sms")
    if budget_is and any(words in text for words in _BUDGETS):
        text += f"; here that is {budget_is}"
    if _SUMMED in text:
        text += "; here, those of a dispatch with do_expand=True"
    found = _FOUND.search(text)
    if found is not None:
        tag, rank, other, peer = map(int, found.groups())
        ours, theirs = (_values(number, _OF_COMBINE if "combine" in text else _OF_DISPATCH) for number in (tag, other))
        differ = [name for name in ours if ours[name] != theirs[name]]
        names = [f"{name} is {ours[name]} on rank {rank}, {theirs[name]} on rank {peer}" for name in differ]
        text = text.replace(found[0], "; ".join(names) or found[0])
    found = _WEIGHTS.search(text)
    if found is not None:
        given = ["None" if says == "no" else "given" for says in found.group(1, 3)]
        text = text.replace(found[0], f"topk_weights is {given[0]} on rank {found[2]}, {given[1]} on rank {found[4]}")
    return translated(type(error)(text))


def _values(tag: int, parts: tuple[_Part, ...]) -> dict[str, object]:
    return {name: values[(tag >> first) % len(values)] for name, first, values in parts}
