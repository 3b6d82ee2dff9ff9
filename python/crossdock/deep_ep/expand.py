# SPDX-License-Identifier: Apache-2.0
"""Rows by rank, each token once, as rows by expert, each token once for every expert here; and back.

Zones of the experts follow each other, each rounded up to the alignment; inside, rows keep their order. All shapes
follow from the number of rows that are asked for, so this can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def align_counts(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    if alignment == 1:
        return counts
    return (counts + (alignment - 1)).div(alignment, rounding_mode="floor") * alignment


@dataclass
class Expansion:
    places: torch.Tensor  # [N, K] int32: the expanded row of each column, -1: none
    sources: torch.Tensor  # [rows] int64: the pair (row, column) of each expanded row, as row * K + column, -1: none

    @staticmethod
    def of(local_ids: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int) -> Expansion:
        """local_ids [N, K], -1 for none; counts [L] how often each occurs; num_rows: of the expanded tensors."""
        local, device = counts.shape[0], local_ids.device
        ids, order = torch.where(local_ids >= 0, local_ids, local).flatten().sort(stable=True)
        # Expanded row = its zone's beginning + how many of the same expert come before.
        rows = torch.arange(len(ids), device=device)
        if alignment > 1:
            gaps = align_counts(counts, alignment) - counts
            rows += (gaps.cumsum(0) - gaps)[ids.clamp_max(local - 1)]
        exists = (ids < local) & (rows < num_rows)
        rows = torch.where(exists, rows, num_rows)
        places = torch.empty_like(rows).scatter_(0, order, torch.where(exists, rows, -1))
        sources = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=device)
        sources.scatter_(0, rows, order)
        return Expansion(places.view(local_ids.shape).int(), sources[:num_rows])

    def spread(self, rows: torch.Tensor, with_zeros: bool) -> torch.Tensor:
        """[N, H] to [rows, H]; rows between zones are zeros if asked for, else undefined."""
        spread = _select(rows, torch.div(self.sources, self.places.shape[1], rounding_mode="floor"))
        if with_zeros:
            spread = _bytes(spread).masked_fill((self.sources < 0).unsqueeze(1), 0).view(rows.dtype)
        return spread

    def spread_columns(self, values: torch.Tensor, with_zeros: bool) -> torch.Tensor:
        """[N, K] to [rows], each of its own pair."""
        spread = _select(values.reshape(-1), self.sources)
        return torch.where(self.sources >= 0, spread, 0) if with_zeros else spread

    def gather_columns(self, values: torch.Tensor) -> torch.Tensor:
        """[rows] to [N, K], 0 where there is none."""
        found = _select(values, self.places.flatten()).view(self.places.shape)
        return torch.where(self.places >= 0, found, 0)

    def add_up(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, H] to [N, H] fp32: sums over a token's experts here, column by column."""
        sums = torch.zeros(self.places.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
        for places in self.places.unbind(1):
            sums += torch.where((places >= 0).unsqueeze(1), _select(rows, places), 0)
        return sums


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _select(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows[index], where negative numbers, and all numbers if there are no rows, select anything."""
    if rows.shape[0] == 0:
        return rows.new_zeros((index.shape[0], *rows.shape[1:]))
    return _bytes(rows).index_select(0, index.clamp_min(0)).view(rows.dtype)
