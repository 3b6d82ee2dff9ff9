# SPDX-License-Identifier: Apache-2.0
"""What all ranks say of a call before rows move: sizes, so that all grow alike, and how many rows go where.

It is told on the host, in shared memory or over the network, so a call that differs between ranks ends in a sentence on
each of them, and nothing has been touched by then.
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from crossdock.deep_ep.config import align
from crossdock.deep_ep.errors import WrongCall
from crossdock.deep_ep.ranks import Ranks

# Equal on all ranks, then the ones that may differ.
SAME = ("kind of call", "number of experts", "top-k", "bytes of a token's row", "columns of scales", "device")
OWN = ("tokens", "rows")
_HEADER = struct.Struct(f"<{len(SAME) + len(OWN)}q")
_OWN = struct.Struct(f"<{len(OWN)}q")
_SAME_BYTES = _HEADER.size - _OWN.size
_COUNTS_UNIT = 2048  # bytes, so that ranks with different numbers of experts can tell each other so


class Agreement:
    """same: values of SAME. tokens: of this rank. rows: that its outputs are to have, 0 if as many as come.

    counts: of this rank's tokens for each rank, then for each expert; all ranks give some, or none does.
    """

    def __init__(
        self, ranks: Ranks, same: tuple[int, ...], tokens: int, rows: int, counts: torch.Tensor | None
    ) -> None:
        payload = _HEADER.pack(*same, tokens, rows)
        if counts is not None:
            told = counts.cpu().numpy().astype(np.int32, copy=False).tobytes()
            payload += told.ljust(align(len(told), _COUNTS_UNIT), b"\0")
        everybody = ranks.gather(payload)
        if any(part[:_SAME_BYTES] != payload[:_SAME_BYTES] for part in everybody):
            _refuse([_HEADER.unpack_from(part) for part in everybody])
        own = [_OWN.unpack_from(part, _SAME_BYTES) for part in everybody]
        self.tokens = [tokens for tokens, _ in own]
        self.most_tokens = max(self.tokens)
        self.most_rows = max(rows for _, rows in own)
        if counts is None:
            return
        everything = np.frombuffer(b"".join(everybody), dtype=np.int32).reshape(ranks.size, -1)
        told_counts = everything[:, _HEADER.size // 4 :]
        self._rank = ranks.rank
        self.rank_counts = told_counts[:, : ranks.size]  # [source, target] rows
        self.expert_counts = told_counts[:, ranks.size : len(counts)]  # [source, expert] selections

    def rows_here(self) -> int:
        """That come to this rank."""
        return int(self.rank_counts[:, self._rank].sum())

    def expert_counts_here(self, alignment: int) -> list[int]:
        """Selections of each expert of this rank, rounded up to a multiple of alignment."""
        local = self.expert_counts.shape[1] // len(self.rank_counts)
        counts = self.expert_counts[:, self._rank * local : (self._rank + 1) * local].sum(axis=0)
        found: list[int] = counts.tolist()
        return found if alignment == 1 else [align(count, alignment) for count in found]


def _refuse(headers: list[tuple[int, ...]]) -> None:
    for i, name in enumerate(SAME):
        values = [header[i] for header in headers]
        if len(set(values)) > 1:
            raise WrongCall(f"{name}: the ranks' values are {values}, expected the same on all")
