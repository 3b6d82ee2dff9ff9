# SPDX-License-Identifier: Apache-2.0
"""What ranks exchange about a call before rows move: sizes, so that buffers grow equally, and row counts per rank.

They exchange it on the host, in shared memory or over the network. A call that differs between ranks fails on all of
them with a message, before any output is written.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

from crossdock._core import column_sums, host_bytes
from crossdock.deep_ep.config import align
from crossdock.deep_ep.errors import WrongCall, require
from crossdock.deep_ep.ranks import Ranks

# Equal on all ranks, then the ones that may differ.
SAME = (
    "kind of call",
    "number of experts",
    "top-k",
    "bytes of a token's row",
    "type of x",
    "columns of scales",
    "type of the scales",
    "device",
    "routing weights",  # 0: none
    "num_max_tokens_per_rank",  # or num_worst_tokens; 0: ranks may differ in it
)
OWN = ("tokens", "rows")
KINDS = (
    "a dispatch without topk_idx",
    "a dispatch with topk_idx",
    "a dispatch with CPU sync",
    "a dispatch without CPU sync",
    "a dispatch with num_worst_tokens",
)
WITHOUT_TOPK_IDX, WITH_TOPK_IDX, WITH_SYNC, WITHOUT_SYNC, WITH_WORST_TOKENS = range(len(KINDS))
# In the header, type i has the number i + 2; 0: no tensor; 1: a type that is not in this list.
_TYPES = (
    *("float32", "int32", "bfloat16", "float16", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "int16", "bool"),
    *("uint16", "uint32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_TYPE_NUMBERS = {getattr(torch, name): 2 + i for i, name in enumerate(_TYPES) if hasattr(torch, name)}
_HEADER = struct.Struct(f"<{len(SAME) + len(OWN)}q")
_OWN = struct.Struct(f"<{len(OWN)}q")
_SAME_BYTES = _HEADER.size - _OWN.size
_FIRST_COUNT = _HEADER.size // 4  # among all words
# Bytes of counts that go with the header, in all calls alike, so that ranks with different numbers of experts still
# exchange messages of one size.
_FIRST_BYTES = 2048


class Agreement:
    """same: values of SAME. tokens: of this rank. rows: that its outputs are to have, 0 if as many as come.

    counts: of this rank's tokens for each rank, and for each expert; all ranks give them, or none does.
    """

    def __init__(
        self,
        ranks: Ranks,
        same: tuple[int, ...],
        tokens: int,
        rows: int,
        counts: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        counted = b"" if counts is None else _bytes_of(*counts)
        # The same size in all calls, so that a mismatch between ranks is found and reported.
        payload = _HEADER.pack(*same, tokens, rows) + counted[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0")
        parts = ranks.gather(payload)
        head = payload[:_SAME_BYTES]
        if any([not part.startswith(head) for part in parts]):
            _refuse([_HEADER.unpack_from(part) for part in parts])
        if len(counted) > _FIRST_BYTES:
            more = ranks.gather(counted[_FIRST_BYTES:])
            parts = [first + rest for first, rest in zip(parts, more, strict=True)]
        own = [_OWN.unpack_from(part, _SAME_BYTES) for part in parts]
        self.most_tokens, self.most_rows = map(max, zip(*own, strict=True))
        self._parts, self._rank, self._num_ranks = parts, ranks.rank, ranks.size
        self._own = own
        self._local = 0 if counts is None else counts[1].shape[0] // ranks.size  # experts

    def rank_counts(self) -> Any:
        """[source, target] rows."""
        everything = np.frombuffer(b"".join(self._parts), dtype=np.int32).reshape(self._num_ranks, -1)
        return everything[:, _FIRST_COUNT : _FIRST_COUNT + self._num_ranks]

    def expect_room(self) -> None:
        """Refuses a call on all ranks if a rank would receive more rows than its num_worst_tokens."""
        received = self.rank_counts().sum(axis=0).tolist()
        for rank, (num, (_, most)) in enumerate(zip(received, self._own, strict=True)):
            if num > most:
                message = f"num_worst_tokens is {most} on rank {rank}, allowed: at least the {num} rows it receives"
                require(False, message)

    def rows_here(self) -> int:
        """Rows that this rank receives."""
        return column_sums(self._parts, _FIRST_COUNT + self._rank, 1)[0]

    def expert_counts_here(self, alignment: int) -> list[int]:
        """Selections of each expert of this rank, rounded up to a multiple of alignment."""
        first = _FIRST_COUNT + self._num_ranks + self._rank * self._local
        found = column_sums(self._parts, first, self._local)
        return found if alignment == 1 else [align(count, alignment) for count in found]


def _bytes_of(per_rank: torch.Tensor, per_expert: torch.Tensor) -> bytes:
    """Of int32."""
    counted: bytes | None = host_bytes(per_rank, per_expert)
    if counted is None:
        counted = torch.cat([per_rank, per_expert]).int().cpu().numpy().tobytes()
    return counted


def number_of_type(tensor: torch.Tensor | None) -> int:
    """A tensor's type, as in SAME."""
    return 0 if tensor is None else _TYPE_NUMBERS.get(tensor.dtype, 1)


def named(same: tuple[int, ...]) -> dict[str, object]:
    """Values of SAME with their names."""
    form: dict[str, object] = dict(zip(SAME, same, strict=False))
    form["kind of call"] = KINDS[same[0]]
    for name in ("type of x", "type of the scales"):
        number = same[SAME.index(name)]
        form[name] = "None" if number == 0 else "another" if number == 1 else f"torch.{_TYPES[number - 2]}"
    if same[0] == WITH_WORST_TOKENS:
        form["num_worst_tokens"] = form.pop("num_max_tokens_per_rank")
    return form


def _refuse(headers: list[tuple[int, ...]]) -> None:
    forms = [named(header) for header in headers]
    for name in forms[0]:
        values = [form.get(name) for form in forms]
        if len(set(values)) > 1:
            rank = next(rank for rank, value in enumerate(values) if value != values[0])
            raise WrongCall(
                f"{name}: the ranks' values are {values}, expected the same on all: rank 0 has {values[0]}, rank "
                f"{rank} has {values[rank]}"
            )
