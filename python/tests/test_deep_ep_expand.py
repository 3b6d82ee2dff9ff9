# SPDX-License-Identifier: Apache-2.0
"""Rows by expert out of rows by rank, and back: what operations of torch say, for random routings."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import crossdock as ep  # noqa: E402
from crossdock._core import expand_rows, place_rows, reduce_rows  # noqa: E402
from crossdock.deep_ep.expand import Expansion  # noqa: E402

LOCAL = 5
# (rows, columns, alignment, expanded rows more than zones have)
SHAPES = ((40, 3, 1, 0), (40, 3, 128, 0), (200, 8, 8, 77), (64, 8, 4, -100), (7, 40, 16, 0), (1, 1, 1, 9), (0, 4, 8, 8))


class Reference:
    """The same by sorting, gathering and adding whole tensors."""

    def __init__(self, local_ids: Any, counts: Any, alignment: int, num_rows: int) -> None:
        local = len(counts)
        ids, order = torch.where(local_ids >= 0, local_ids, local).flatten().sort(stable=True)
        # Expanded row = its zone's beginning + how many of the same expert come before.
        gaps = -counts % alignment
        rows = torch.arange(len(ids)) + (gaps.cumsum(0) - gaps)[ids.clamp_max(local - 1)]
        exists = (ids < local) & (rows < num_rows)
        rows = torch.where(exists, rows, num_rows)
        places = torch.empty_like(rows).scatter_(0, order, torch.where(exists, rows, -1))
        sources = torch.full((num_rows + 1,), -1)
        sources[int((counts + gaps).sum()) :] = -2
        sources.scatter_(0, rows, order)
        self.places, self.sources = places.view(local_ids.shape), sources[:num_rows]

    def spread(self, rows: Any) -> Any:
        """Zeros in gaps."""
        if len(rows) == 0:
            return torch.zeros(len(self.sources), *rows.shape[1:], dtype=rows.dtype)
        found = rows.index_select(0, (self.sources // self.places.shape[1]).clamp_min(0))
        return found.masked_fill((self.sources < 0).unsqueeze(1), 0)

    def spread_columns(self, values: Any) -> Any:
        if values.numel() == 0:
            return torch.zeros(len(self.sources))
        return torch.where(self.sources >= 0, values.flatten()[self.sources.clamp_min(0)], 0)

    def gather_columns(self, values: Any) -> Any:
        return torch.where(self.places >= 0, values[self.places.clamp_min(0)], 0)

    def add_up(self, rows: Any) -> Any:
        """fp32, column by column."""
        sums = torch.zeros(len(self.places), rows.shape[1])
        for places in self.places.unbind(1):
            sums += torch.where((places >= 0).unsqueeze(1), rows[places.clamp_min(0)], 0)
        return sums


def made(shape: tuple[int, int, int, int], dtype: Any) -> tuple[Expansion, Reference, Any]:
    """And the metadata that the places were written to."""
    rows, columns, alignment, more = shape
    ids = torch.randint(-3, LOCAL, (rows, columns), dtype=dtype).clamp_min(-1)
    counts = torch.bincount(ids[ids >= 0].flatten(), minlength=LOCAL).int()
    num_rows = max(0, int((counts + -counts % alignment).sum()) + more)
    metadata = torch.full((rows, columns + 2), 7, dtype=torch.int32)
    expansion = Expansion.of(ids, counts, alignment, num_rows, metadata)
    return expansion, Reference(ids, counts, alignment, num_rows), metadata


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_places_and_rows(shape: tuple[int, int, int, int], dtype: Any) -> None:
    torch.manual_seed(1)
    for _ in range(10):
        expansion, reference, metadata = made(shape, dtype)
        assert torch.equal(expansion.places, reference.places.int())
        assert torch.equal(expansion.sources, reference.sources.int())
        assert torch.equal(metadata[:, 2:], expansion.places) and (metadata[:, :2] == 7).all()
        num_rows, weights = len(expansion.places), torch.rand(expansion.places.shape)
        exists, in_zones = expansion.sources >= 0, expansion.sources >= -1
        for rows in (torch.randn(num_rows, 16).bfloat16(), torch.randn(num_rows, 5), torch.randn(num_rows, 7).half()):
            scales = torch.rand(3, num_rows).t()
            expected = [reference.spread(rows), reference.spread(scales), reference.spread_columns(weights)]
            for column_major in (False, True):
                for one, wanted in zip(
                    expansion.spread(rows, scales, weights, True, column_major), expected, strict=True
                ):
                    assert one is not None and torch.equal(one[in_zones], wanted[in_zones])
                for one, wanted in zip(
                    expansion.spread(rows, scales, weights, False, column_major), expected, strict=True
                ):
                    assert one is not None and torch.equal(one[exists], wanted[exists])
            found, no_scales, no_weights = expansion.spread(rows, None, None, True)
            assert torch.equal(found[in_zones], expected[0][in_zones]) and no_scales is None and no_weights is None
        eight_bits = torch.randint(0, 256, (num_rows, 24), dtype=torch.uint8)
        found = expansion.spread(eight_bits.view(torch.float8_e4m3fn), None, None, True)[0]
        assert found.dtype == torch.float8_e4m3fn
        assert torch.equal(found.view(torch.uint8)[in_zones], reference.spread(eight_bits)[in_zones])


@pytest.mark.parametrize("hidden", [1, 24, 264])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] > 0])
def test_sums_are_the_same_bits(shape: tuple[int, int, int, int], hidden: int) -> None:
    torch.manual_seed(2)
    for _ in range(10):
        expansion, reference, _ = made(shape, torch.int32)
        rows = (torch.randn(len(expansion.sources), hidden) * 100).bfloat16()
        rows[expansion.sources < 0] = torch.nan  # what is in gaps is not read
        weights, expected = torch.rand(len(rows)), reference.add_up(torch.nan_to_num(rows))
        sums, returned = expansion.add_up(rows, weights, torch.float32)
        assert torch.equal(sums, expected) and returned is not None
        assert torch.equal(returned, reference.gather_columns(weights))
        rounded, nothing = expansion.add_up(rows, None, torch.bfloat16)
        assert torch.equal(rounded, expected.bfloat16()) and nothing is None


def test_tensors_that_need_gradients_and_inference() -> None:
    expansion, reference, _ = made(SHAPES[0], torch.int64)
    rows = torch.randn(len(expansion.sources), 8).bfloat16().requires_grad_()
    assert torch.equal(expansion.add_up(rows, None, torch.float32)[0], reference.add_up(rows.detach()))
    with torch.inference_mode():
        again = made(SHAPES[0], torch.int64)[0]
        assert again.add_up(rows.detach(), None, torch.float32)[0].is_inference()


def test_tensors_that_do_not_fit_are_refused() -> None:
    def int32(*shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.int32)

    ids, counts, places, sources = int32(4, 2), int32(3), int32(4, 2), int32(6)
    rows, expanded = torch.zeros(4, 8).bfloat16(), torch.zeros(6, 8).bfloat16()
    cases: Any = (
        (lambda: place_rows(ids.t(), counts, 1, places, sources), r"ids is \[2, 4\] .* strides \(1, 2\), expected"),
        (lambda: place_rows(ids.float(), counts, 1, places, sources), r"ids is \[4, 2\] of torch.float32 .* int64"),
        (lambda: place_rows(ids, counts, 0, places, sources), "alignment is 0, allowed: 1..2147483647"),
        (lambda: place_rows(ids, counts.long(), 1, places, sources), r"counts is \[3\] of torch.int64 .* 4 bytes"),
        (lambda: place_rows(ids, counts, 1, places[1:], sources), r"places is \[3, 2\] .* dense tensor of 8 "),
        (lambda: place_rows(ids, counts, 1, places, sources, ids), r"metadata is \[4, 2\] .* tensor of 16 "),
        (
            lambda: expand_rows(places, sources, rows[1:], expanded, None, None, None, None, True),
            r"rows is \[3, 8\] of .*, expected \[4, H\] where expanded is",
        ),
        (
            lambda: expand_rows(places, sources[1:], rows, expanded, None, None, None, None, True),
            "sources is .*, expected a dense tensor of 6 elements",
        ),
        (
            lambda: expand_rows(
                places, sources, rows, expanded, torch.zeros(4, 2), torch.zeros(6, 3), None, None, True
            ),
            "expanded_scales is .*, expected 2 columns, as scales has",
        ),
        (
            lambda: expand_rows(places, sources, rows, expanded, None, None, torch.zeros(4, 2), None, True),
            "expanded_weights is NULL",
        ),
        (lambda: reduce_rows(places, expanded.float(), rows, None, None), "rows is .* two dimensions of bfloat16"),
        (lambda: reduce_rows(places, expanded, rows[1:], None, None), r"sums is \[3, 8\] .*, expected \[4, H\]"),
        (lambda: reduce_rows(places, expanded, rows.half(), None, None), "sum_type is 6, allowed: ncclFloat32"),
        (lambda: reduce_rows(places, expanded, rows, torch.zeros(6), None), "pair_weights is NULL"),
    )
    for refused, message in cases:
        with pytest.raises(ep.InvalidArgument, match=message):
            refused()
