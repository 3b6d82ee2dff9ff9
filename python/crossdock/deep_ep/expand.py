# SPDX-License-Identifier: Apache-2.0
"""Rows by rank, each token once, as rows by expert, each token once for every expert here; and back.

The experts' zones follow each other, each rounded up to the alignment; rows keep their order inside. All shapes follow
from the requested number of rows, so this can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from crossdock._core import expand_rows, place_rows, reduce_rows
from crossdock.deep_ep.makers import maker_of, makers_of
from crossdock.deep_ep.scales import empty_scales


@dataclass(slots=True)
class Expansion:
    places: torch.Tensor  # [N, K] int32: the expanded row of each column, -1: none
    sources: torch.Tensor  # [rows] int32: the pair (row, column) of each expanded row, as row * K + column; or negative

    @staticmethod
    def of(
        local_ids: torch.Tensor,
        counts: torch.Tensor,
        alignment: int,
        num_rows: int,
        metadata: torch.Tensor | None = None,
    ) -> Expansion:
        """local_ids [N, K], -1 for none; counts [L] int32, how often each occurs; num_rows: of the expanded tensors.

        metadata [N, K + 2] int32: places are written to its columns, too, from the third on.
        """
        make = makers_of(local_ids.device).int32
        expansion = Expansion(make(*local_ids.shape), make(num_rows))
        place_rows(local_ids, counts, alignment, expansion.places, expansion.sources, metadata)
        return expansion

    def spread(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        weights: torch.Tensor | None,
        with_zeros: bool,
        column_major: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """[N, H], [N, S] and [N, K] to [rows, H], [rows, S] and [rows], each weight of its own pair.

        Rows that fill up zones are zeros if asked for, else undefined. column_major: so the expanded scales lie.
        """
        num_rows = self.sources.shape[0]
        expanded = maker_of(rows.dtype, rows.device)(num_rows, rows.shape[1])
        of_scales = None if scales is None else empty_scales(scales, num_rows, column_major)
        of_pairs = None if weights is None else makers_of(rows.device).float32(num_rows)
        expand_rows(self.places, self.sources, rows, expanded, scales, of_scales, weights, of_pairs, with_zeros)
        return expanded, of_scales, of_pairs

    def add_up(
        self, rows: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[rows, H] bf16 and [rows] fp32 to [N, H] of dtype and [N, K].

        Sums over a token's experts here, column by column in fp32, rounded at most once; weights by column, 0 where
        there is none.
        """
        sums = maker_of(dtype, rows.device)(self.places.shape[0], rows.shape[1])
        of_pairs = None if weights is None else makers_of(rows.device).float32(*self.places.shape)
        reduce_rows(self.places, rows, sums, weights, of_pairs)
        return sums, of_pairs
