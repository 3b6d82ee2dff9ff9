# SPDX-License-Identifier: Apache-2.0
"""A call's tag (crossdockHandleSetTag): one number for what must be the same on all ranks but the library cannot see.

Kernels compare tags on entry, so this costs no exchange. Calls along a handle whose rows go without scales and weights,
unpadded and in their own type, have tag 0. The tag of a call without CPU sync is the number of its form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from crossdock.deep_ep.rows import CARRIED_TYPES, UNIT
from crossdock.errors import Error

MOST = 1023
_ROW_BYTES = f"the bytes of a row of x modulo {UNIT}"
_GIVEN = ("None", "given")
_AS_BYTES = {torch.int32: 1, torch.int16: 2}
# The name, lowest bit and values of each part of a tag.
_Part = tuple[str, int, Sequence[object]]
_OF_DISPATCH: tuple[_Part, ...] = (
    (_ROW_BYTES, 0, range(16)),
    ("the type of x", 4, ("one that goes as such", "torch.int32", "torch.int16", "another")),
    ("the columns of scales and topk_weights modulo 4", 6, range(4)),
    ("the type of the scales of x", 8, ("None or torch.float32", "torch.int32")),
    ("topk_weights", 9, _GIVEN),
)
_OF_COMBINE: tuple[_Part, ...] = ((_ROW_BYTES, 0, range(16)), ("topk_weights", 4, _GIVEN), ("bias", 5, _GIVEN))
_FOUND = re.compile(r"the tag \(crossdockHandleSetTag\) is (\d+) on rank (\d+), (\d+) on rank (\d+)")
_SMS = "the number of SMs (crossdockHandleSetSms)"


def of_dispatch(rows: torch.Tensor, scales: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> int:
    tag = rows.shape[1] * rows.element_size() % UNIT
    if rows.dtype not in CARRIED_TYPES:
        tag |= _AS_BYTES.get(rows.dtype, 3) << 4
    columns = sum(part.shape[1] for part in (scales, weights) if part is not None) % 4
    has_int32 = scales is not None and scales.dtype == torch.int32
    return tag | columns << 6 | has_int32 << 8 | (weights is not None) << 9


# Bits of a combine's tag, as in _OF_COMBINE.
WEIGHTS, BIAS = 1 << 4, 1 << 5


def explained(error: Error, form_of: Callable[[int], dict[str, object]]) -> Error:
    """The error with names and values in place of tags. form_of: names and values of the form with a given tag."""
    if _SMS in str(error):
        error = type(error)(str(error).replace(_SMS, "num_sms"))
    found = _FOUND.search(str(error))
    if found is None:
        is_budget = "whose max_recv_tokens_per_rank is" in str(error)
        return type(error)(f"{error}; here that is num_worst_tokens") if is_budget else error
    tag, rank, other, peer = map(int, found.groups())
    if "HT update" in str(error):
        ours, theirs = form_of(tag), form_of(other)
    else:
        parts = _OF_COMBINE if "HT combine" in str(error) else _OF_DISPATCH
        ours, theirs = _values(tag, parts), _values(other, parts)
    differ = [name for name in ours if ours[name] != theirs.get(name)]
    if not differ:
        return error
    text = "; ".join(f"{name} is {ours[name]} on rank {rank}, {theirs.get(name)} on rank {peer}" for name in differ)
    return type(error)(str(error).replace(found[0], text))


def _values(tag: int, parts: tuple[_Part, ...]) -> dict[str, object]:
    return {name: values[(tag >> first) % len(values)] for name, first, values in parts}
