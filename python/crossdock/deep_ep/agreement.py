# SPDX-License-Identifier: Apache-2.0
"""What all ranks say of a call before rows move: sizes, so that all grow alike, and how many rows go where.

It is told on the host, in shared memory or over the network, so a call that differs between ranks ends in a sentence on
each of them, and nothing has been touched by then.
"""

from __future__ import annotations

import struct

import torch

from crossdock.deep_ep.errors import WrongCall
from crossdock.deep_ep.ranks import Ranks

# Equal on all ranks, then the ones that may differ.
SAME = ("kind of call", "number of experts", "top-k", "bytes of a token's row", "columns of scales", "device")
OWN = ("tokens", "rows")
_HEADER = struct.Struct(f"<{len(SAME) + len(OWN)}q")
_COUNTS_UNIT = 512  # so that ranks with different numbers of experts can tell each other so


class Agreement:
    """same: values of SAME. tokens: of this rank. rows: that its outputs are to have, 0 if as many as come.

    counts: of this rank's tokens for each rank, then for each expert; all ranks give some, or none does.
    """

    def __init__(
        self, ranks: Ranks, same: tuple[int, ...], tokens: int, rows: int, counts: torch.Tensor | None
    ) -> None:
        payload = _HEADER.pack(*same, tokens, rows)
        if counts is not None:
            told = counts.to("cpu", torch.int32)
            size = -(-len(told) // _COUNTS_UNIT) * _COUNTS_UNIT
            padded = torch.zeros(size, dtype=torch.int32)
            padded[: len(told)] = told
            payload += padded.numpy().tobytes()
        everybody = ranks.gather(payload)
        headers = [_HEADER.unpack_from(part) for part in everybody]
        for i, name in enumerate(SAME):
            values = [header[i] for header in headers]
            if len(set(values)) > 1:
                raise WrongCall(f"{name}: the ranks' values are {values}, expected the same on all")
        self.tokens = [header[len(SAME)] for header in headers]
        self.most_tokens = max(self.tokens)
        self.most_rows = max(header[len(SAME) + 1] for header in headers)
        if counts is None:
            return
        parts = b"".join(part[_HEADER.size :] for part in everybody)
        told = torch.frombuffer(bytearray(parts), dtype=torch.int32).view(ranks.size, -1)
        self.rank_counts = told[:, : ranks.size]  # [source, target] rows
        self.expert_counts = told[:, ranks.size : len(counts)]  # [source, expert] selections
