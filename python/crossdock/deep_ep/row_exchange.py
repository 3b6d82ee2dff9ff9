# SPDX-License-Identifier: Apache-2.0
"""Rows to ranks and back, for the normal mode and ElasticBuffer: each token once to every rank that wants it.

It stands on high throughput with flat rows, where "experts" are the ranks: which experts of a rank a token is for
travels beside its row, column by column, so it can say more than routing does (repeated experts, weights by column).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from crossdock._core import Algorithm, Layout, LayoutInfo, RowRoute, SideStream, dispatch_rows
from crossdock.copies import Uncopied
from crossdock.deep_ep import rows as carried
from crossdock.deep_ep import tags
from crossdock.deep_ep.agreement import named
from crossdock.deep_ep.config import align
from crossdock.deep_ep.errors import require, require_state, translated
from crossdock.deep_ep.groups import Lease, PooledGroup, is_capturing
from crossdock.deep_ep.makers import maker_of, makers_of
from crossdock.deep_ep.ranks import Ranks
from crossdock.errors import Error

SMALLEST_TOKENS = 128
FEWEST_WORDS = 96  # of 4 bytes, that have room beside a row at least


@dataclass(slots=True)
class Route(Uncopied):
    """Where the tokens of one dispatch went; combine and repeated dispatches go by it."""

    _remedy = "dispatch again, which returns another one"

    owner: RowExchange
    lease: Lease
    num_tokens: int  # of this rank
    num_rows: int  # of the tensors that a dispatch gives and a combine takes
    tensor_rows: int  # that the library wants: no fewer than its budget
    num_received: int | None  # None: only the device knows ...
    total: torch.Tensor  # ... here, int32 [1]
    capacity: int  # bytes of a row with what travels beside it
    plain: RowRoute | None  # for tensors that go as they are

    @property
    def received(self) -> int | torch.Tensor:
        """How many rows came, here or on the device."""
        return self.total if self.num_received is None else self.num_received


@dataclass
class _Size:
    """What a pool was made for."""

    pool: PooledGroup
    tokens: int
    capacity: int
    rows: int  # budget; 0: none


def _grown(needed: int, smallest: int) -> int:
    """A size with room to grow, so that few groups are made."""
    size = smallest
    while size < needed:
        size *= 2
    return size


class RowExchange:
    """Of one Buffer."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._sizes: dict[tuple[str, int, int], _Size] = {}
        self._pools: list[PooledGroup] = []
        # Forms of calls without CPU sync that ranks have compared, and their tags.
        self.forms: dict[tuple[int, ...], int] = {}

    def translated(self, error: Error) -> Error:
        return translated(tags.explained(error, self._form_of))

    def _form_of(self, tag: int) -> dict[str, object]:
        return next((named(form) for form, number in self.forms.items() if number == tag), {})

    def route(
        self,
        targets: torch.Tensor,
        most_tokens: int,
        row_bytes: int,
        side_words: int,
        budget: int,
        num_received: int | None,
        sms: int,
        tag: int = 0,
    ) -> Route:
        """Makes way for tokens: targets [T, n] has the ranks of each, -1 where there are fewer. Collective.

        most_tokens, row_bytes, side_words and budget are the same on all ranks. sms: of this operation, as in limit.
        budget: rows of every tensor, for
        calls that must not wait for the number of rows; 0: num_received is that number, None: read it from the device.
        More rows than a budget fail the group.
        """
        device = targets.device
        pool = self._pool(device, most_tokens, carried.padded_bytes(row_bytes), side_words, budget)
        lease = Lease(pool.pool, -1)
        total = makers_of(device).int32(1)
        try:
            self.limit(lease, sms)
            lease.handle.set_tag(tag)
            lease.handle.update(targets, layout_info=LayoutInfo(recv_total_counter=total))
        except Error as error:
            raise self.translated(error) from error
        if pool.pool.is_cpu or (budget == 0 and num_received is None):
            num_received = int(total)
        num_rows = budget or num_received or 0
        tensor_rows = max(num_rows, pool.rows)
        num_tokens, plain = targets.shape[0], None
        if tensor_rows == num_rows:
            plain = RowRoute(lease.handle, num_tokens, num_rows, pool.capacity)
        return Route(self, lease, num_tokens, num_rows, tensor_rows, num_received, total, pool.capacity, plain)

    def _pool(self, device: torch.device, tokens: int, row_bytes: int, side_words: int, budget: int) -> _Size:
        key = (device.type, device.index or 0, budget)
        size = self._sizes.get(key)
        capacity = row_bytes + 4 * max(side_words, FEWEST_WORDS)
        if size is not None and tokens <= size.tokens and capacity <= size.capacity:
            return size
        is_captured = is_capturing()
        require_state(
            not is_captured,
            lambda: (
                f"the first call with {tokens} tokens, {row_bytes} bytes per row and {budget} rows grows the buffer,"
                " which cannot be captured: make one such call before"
            ),
        )
        # Room for both directions of callers that send 8-bit rows and return 16-bit rows.
        capacity = max(capacity, 2 * row_bytes, size.capacity if size else 0)
        grown = _grown(tokens, size.tokens if size else SMALLEST_TOKENS)
        # A group's budget is at least its tokens; it must not exceed this call's budget, or an overflow is not found.
        tokens = min(grown, max(tokens, budget)) if budget else grown
        rows = max(budget, tokens) if budget else 0
        pool = PooledGroup(
            self.ranks,
            device,
            Layout.FLAT,
            algorithm=Algorithm.HIGH_THROUGHPUT,
            num_experts=self.ranks.size,
            max_dispatch_tokens_per_rank=tokens,
            max_recv_tokens_per_rank=rows,
            max_token_bytes=capacity,
        )
        self._pools.append(pool)
        self._sizes[key] = _Size(pool, tokens, capacity, rows)
        return self._sizes[key]

    @staticmethod
    def limit(lease: Lease, sms: int) -> None:
        """From now on operations of the handle take at most so many SMs; the same on all ranks with GPUs."""
        lease.handle.set_sms(sms)

    def send(
        self, route: Route, tokens: torch.Tensor, words: torch.Tensor | None, tag: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens [T, H] of any type, and beside each row its words [T, W]: the N rows that came, and theirs.

        The received words have as many rows as the library wants, no fewer than N. Rows longer than the group was made
        for go in pieces, as in add_up.
        """
        hidden, dtype = tokens.shape[1], tokens.dtype
        rows = carried.as_carried(tokens)
        kind = None if rows is tokens else carried.CARRIED_TYPES.get(dtype, carried.BYTES)
        if rows.shape[1] * rows.element_size() + (0 if words is None else 4 * words.shape[1]) <= route.capacity:
            received, found = self._carry(route, rows, words, kind, tag)
        else:
            received, found = self._carry_in_pieces(route, rows, kind, tag), None
            if words is not None:
                found = self._carry_in_pieces(route, words.view(torch.uint8), None, tag).view(torch.int32)
        route.lease.forget()
        if route.tensor_rows != route.num_rows:
            received = received[: route.num_rows]
        return carried.from_carried(received, hidden, dtype), found

    def _carry(
        self, route: Route, rows: torch.Tensor, words: torch.Tensor | None, kind: int | None, tag: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        received = maker_of(rows.dtype, rows.device)(route.tensor_rows, rows.shape[1])
        found = None
        if words is not None:
            found = makers_of(words.device).int32(route.tensor_rows, words.shape[1])
        try:
            dispatch_rows(route.lease.handle, rows, received, words, found, kind, tag)
        except Error as error:
            raise self.translated(error) from error
        return received, found

    def _carry_in_pieces(self, route: Route, rows: torch.Tensor, kind: int | None, tag: int) -> torch.Tensor:
        step = route.capacity // carried.UNIT * carried.UNIT // rows.element_size()
        pieces = [rows[:, first : first + step].contiguous() for first in range(0, rows.shape[1], step)]
        return torch.cat([self._carry(route, piece, None, kind, tag)[0] for piece in pieces], dim=1)

    def send_again(
        self, route: Route, tokens: torch.Tensor, scales: torch.Tensor | None, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """tokens, scales and weights [T, n] of 4-byte elements where there are some: the N rows of each that came."""
        beside, tag = (scales, weights), tags.of_dispatch(tokens, scales, weights)
        parts = [part for part in beside if part is not None]
        if not parts:
            return self.send(route, tokens, None, tag)[0], list(beside)
        joined = parts[0] if len(parts) == 1 else torch.cat([part.view(torch.int32) for part in parts], dim=1)
        received, words = self.send(route, tokens, carried.words_of(joined), tag)
        assert words is not None
        first = 0
        found: list[torch.Tensor | None] = []
        for part in beside:
            if part is None:
                found.append(None)
                continue
            columns = words[: route.num_rows, first : first + part.shape[1]]
            found.append(columns.contiguous().view(part.dtype))
            first += part.shape[1]
        return received, found

    def send_plain(self, route: Any, x: Any, sms: int, side: SideStream | None = None) -> Any:
        """Sends x along a route and returns the received rows. None: x needs a conversion, take the general path.

        side: for an asynchronous call, which returns the rows and an EventOverlap.
        """
        if type(route) is not Route or route.owner is not self or route.plain is None:
            return None
        self.limit(route.lease, sms)
        try:
            return route.plain.send_again(x, side)
        except Error as error:
            raise self.translated(error) from error

    def add_up_plain(self, route: Any, rows: Any, sms: int, side: SideStream | None = None) -> Any:
        """add_up, likewise."""
        if type(route) is not Route or route.owner is not self or route.plain is None:
            return None
        self.limit(route.lease, sms)
        return self._add_up_plain(route, rows, 0, side)

    def _add_up_plain(self, route: Route, rows: torch.Tensor, tag: int, side: SideStream | None = None) -> Any:
        try:
            return None if route.plain is None else route.plain.add_up(rows, side, tag)
        except Error as error:
            raise self.translated(error) from error

    def add_up(self, route: Route, rows: torch.Tensor, tag: int = 0) -> torch.Tensor:
        """rows [N, H] bf16, fp16 or fp32: the sums [T, H] over ranks, in fp32, ascending by rank, rounded once.

        tag: tags.WEIGHTS and tags.BIAS, if the combine has them.
        """
        plain: torch.Tensor | None = self._add_up_plain(route, rows, tag)
        if plain is not None:
            return plain
        hidden, size = rows.shape[1], rows.element_size()
        unit = carried.UNIT // size
        tag |= hidden % unit * size
        padded = align(max(hidden, 1), unit)
        num_rows = route.tensor_rows
        step = route.capacity // carried.UNIT * unit
        if padded != hidden and padded <= step and num_rows == rows.shape[0]:
            # Columns are summed each for itself: what the padding has does not matter.
            wide = maker_of(rows.dtype, rows.device)(num_rows, padded)
            wide.narrow(1, 0, hidden).copy_(rows)
            plain = self._add_up_plain(route, wide, tag)
            if plain is not None:
                return plain.narrow(1, 0, hidden).contiguous()
        if padded != hidden or num_rows != rows.shape[0]:
            wide = rows.new_zeros(num_rows, padded)
            wide[: rows.shape[0], :hidden] = rows
            rows = wide
        result = rows.new_empty(route.num_tokens, padded)
        # Rows longer than the group was made for return in pieces.
        try:
            route.lease.handle.set_tag(tag)
            if padded <= step:
                route.lease.handle.combine(rows, result)
            else:
                for first in range(0, padded, step):
                    piece = rows[:, first : first + step].contiguous()
                    sums = piece.new_empty(route.num_tokens, piece.shape[1])
                    route.lease.handle.combine(piece, sums)
                    result[:, first : first + step] = sums
        except Error as error:
            raise self.translated(error) from error
        route.lease.forget()
        return result if padded == hidden else result[:, :hidden].contiguous()

    def close(self) -> None:
        """Collective."""
        for pool in self._pools:
            pool.close()
        self._pools, self._sizes = [], {}
