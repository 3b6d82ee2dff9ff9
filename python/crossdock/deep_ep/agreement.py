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
from crossdock.deep_ep.errors import WrongCall
from crossdock.deep_ep.ranks import Ranks

# Equal on all ranks, then the ones that may differ.
SAME = (
    "kind of call",
    "number of experts",
    "top-k",
    "bytes of a token's row",
    "columns of scales",
    "device",
    "routing weights",  # 0: none
    "num_max_tokens_per_rank",  # 0: ranks may differ in it
)
OWN = ("tokens", "rows")
KINDS = (
    "a dispatch without topk_idx",
    "a dispatch with topk_idx",
    "a dispatch with CPU sync",
    "a dispatch without CPU sync",
)
_HEADER = struct.Struct(f"<{len(SAME) + len(OWN)}q")
_OWN = struct.Struct(f"<{len(OWN)}q")
_SAME_BYTES = _HEADER.size - _OWN.size
_FIRST_COUNT = _HEADER.size // 4  # among all words
_COUNTS_UNIT = 2048  # bytes, so that ranks with different numbers of experts still exchange messages of one size


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
        # The same size with and without counts, so that a mismatch between ranks is found and reported.
        room = align(4 * (ranks.size + same[1]), _COUNTS_UNIT)
        payload = _HEADER.pack(*same, tokens, rows) + counted.ljust(room, b"\0")
        parts = ranks.gather(payload)
        head = payload[:_SAME_BYTES]
        if not all(part.startswith(head) for part in parts):
            _refuse([_HEADER.unpack_from(part) for part in parts])
        own = [_OWN.unpack_from(part, _SAME_BYTES) for part in parts]
        self.most_tokens, self.most_rows = max(tokens for tokens, _ in own), max(rows for _, rows in own)
        self._parts, self._rank, self._num_ranks = parts, ranks.rank, ranks.size
        self._local = 0 if counts is None else counts[1].shape[0] // ranks.size  # experts

    def rank_counts(self) -> Any:
        """[source, target] rows."""
        everything = np.frombuffer(b"".join(self._parts), dtype=np.int32).reshape(self._num_ranks, -1)
        return everything[:, _FIRST_COUNT : _FIRST_COUNT + self._num_ranks]

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


def _refuse(headers: list[tuple[int, ...]]) -> None:
    for i, name in enumerate(SAME):
        values: list[Any] = [header[i] for header in headers]
        if len(set(values)) > 1:
            if i == 0:
                values = [KINDS[value] for value in values]
            rank = next(rank for rank, value in enumerate(values) if value != values[0])
            raise WrongCall(
                f"{name}: the ranks' values are {values}, expected the same on all: rank 0 has {values[0]}, rank "
                f"{rank} has {values[rank]}"
            )
