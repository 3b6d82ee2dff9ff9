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
from crossdock.deep_ep.checks import refuse
from crossdock.deep_ep.config import align
from crossdock.deep_ep.ranks import SETTINGS_BYTES, Ranks, Settings, expect_same, said
from crossdock.deep_ep.rows import row_bytes_of

_OWN = struct.Struct("<2q")  # tokens and rows, which may differ
_FIRST_COUNT = (SETTINGS_BYTES + _OWN.size) // 4  # among all words
# Bytes of counts that go with the header, in all calls alike, so that ranks with different numbers of experts still
# exchange messages of one size.
_FIRST_BYTES = 2048


def call_form(
    kind: str,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    num_experts: int,
    topk: int,
    weights: torch.Tensor | None,
    most: tuple[str, int],
) -> Settings:
    """kind: without its "a dispatch"; most: name and value of the argument that bounds rows, 0: ranks may differ."""
    return {
        "kind of call": f"a dispatch {kind}",
        "number of experts": num_experts,
        "top-k": topk,
        "bytes of a token's row": row_bytes_of(x),
        "type of x": x.dtype,
        "columns of scales": 0 if scales is None else scales.shape[1],
        "type of the scales": None if scales is None else scales.dtype,
        "device": x.device.type,
        "routing weights": 0 if weights is None else 1,
        most[0]: most[1],
    }


class Agreement:
    """tokens: of this rank. rows: that its outputs are to have, 0 if as many as come.

    counts: of this rank's tokens for each rank, and for each expert; all ranks give them, or none does.
    """

    def __init__(
        self, ranks: Ranks, form: Settings, tokens: int, rows: int, counts: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        counted: bytes = b""
        if counts is not None:
            counted = host_bytes(*counts) or torch.cat(counts).int().cpu().numpy().tobytes()
        # The same size in all calls, so that a mismatch between ranks is found and reported.
        first = counted[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0")
        parts = ranks.gather(said(form) + _OWN.pack(tokens, rows) + first)
        expect_same(form, parts)
        if len(counted) > _FIRST_BYTES:
            more = ranks.gather(counted[_FIRST_BYTES:])
            parts = [first + rest for first, rest in zip(parts, more, strict=True)]
        self._own = [_OWN.unpack_from(part, SETTINGS_BYTES) for part in parts]
        self.most_tokens, self.most_rows = map(max, zip(*self._own, strict=True))
        self._parts, self._rank, self._num_ranks = parts, ranks.rank, ranks.size
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
                refuse(f"num_worst_tokens is {most} on rank {rank}, allowed: at least the {num} rows it receives")

    def rows_here(self) -> int:
        """Rows that this rank receives."""
        return column_sums(self._parts, _FIRST_COUNT + self._rank, 1)[0]

    def expert_counts_here(self, alignment: int) -> list[int]:
        """Selections of each expert of this rank, rounded up to a multiple of alignment."""
        first = _FIRST_COUNT + self._num_ranks + self._rank * self._local
        found = column_sums(self._parts, first, self._local)
        return found if alignment == 1 else [align(count, alignment) for count in found]
