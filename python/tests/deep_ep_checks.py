# SPDX-License-Identifier: Apache-2.0
"""What the tests of crossdock.deep_ep share: routing that every rank knows of every other, and what follows from it."""

from __future__ import annotations

from typing import Any

import torch


class Problem:
    """Tokens of all ranks. Elements of tag columns (the last 4) are small numbers that tell rank and token exactly."""

    def __init__(
        self,
        num_ranks: int,
        tokens: list[int],
        hidden: int = 256,
        topk: int = 3,
        experts_per_rank: int = 2,
        repeats: bool = False,
        dropped: int = 3,
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.num_ranks, self.topk, self.hidden = num_ranks, topk, hidden
        self.num_experts = experts_per_rank * num_ranks
        self.local = experts_per_rank
        self.x = [torch.randn(num, hidden, generator=random).bfloat16() for num in tokens]
        for rank, x in enumerate(self.x):
            x[:, -4] = rank
            x[:, -3] = torch.arange(len(x)).bfloat16() % 16
            x[:, -2] = torch.div(torch.arange(len(x)), 16, rounding_mode="floor").bfloat16()
        self.ids = []
        for num in tokens:
            scores = torch.rand(num, self.num_experts, generator=random)
            ids = scores.topk(topk, dim=1).indices
            if repeats and num > 1:
                ids[0, 1] = ids[0, 0]
            for i in range(min(dropped, num)):
                ids[num - 1 - i, torch.randint(topk, (), generator=random)] = -1
            if dropped and num > 2:
                ids[1] = -1
            self.ids.append(ids)
        self.weights = [torch.rand(num, topk, generator=random) for num in tokens]

    def is_in_rank(self, source: int) -> Any:
        ranks = torch.where(self.ids[source] >= 0, self.ids[source] // self.local, -1)
        return torch.stack([(ranks == rank).any(dim=1) for rank in range(self.num_ranks)], dim=1)

    def received(self, rank: int) -> tuple[Any, Any, Any, Any, Any]:
        """Rows, local ids, weights, source ranks and tokens that a rank gets, in order."""
        parts = []
        for source in range(self.num_ranks):
            chosen = self.is_in_rank(source)[:, rank].nonzero()[:, 0]
            ids = self.ids[source][chosen] - rank * self.local
            is_here = (ids >= 0) & (ids < self.local) & (self.ids[source][chosen] >= 0)
            parts.append(
                (
                    self.x[source][chosen],
                    torch.where(is_here, ids, -1),
                    torch.where(is_here, self.weights[source][chosen], 0),
                    torch.full((len(chosen),), source),
                    chosen,
                )
            )
        rows, ids, weights, sources, tokens = (torch.cat(part) for part in zip(*parts, strict=True))
        return rows, ids, weights, sources, tokens

    def counts(self, rank: int) -> Any:
        """Pairs of row and column of each local expert."""
        ids = self.received(rank)[1]
        return torch.stack([(ids == expert).sum() for expert in range(self.local)])

    def tokens(self, rank: int) -> Any:
        """Of each local expert; a token that names it twice counts once."""
        ids = self.received(rank)[1]
        return torch.stack([(ids == expert).any(dim=1).sum() for expert in range(self.local)])


def arguments_of(layout: tuple[Any, ...]) -> dict[str, Any]:
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
    return dict(zip(names, layout[:4], strict=True))
