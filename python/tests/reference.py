# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of all ranks in plain NumPy, to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class Problem:
    """Tokens, choices and weights of every rank; rank r has tokens[r] [B_r, H], topk_idx[r] and topk_weights[r]."""

    num_experts: int
    max_tokens: int
    tokens: list[Array]
    topk_idx: list[Array]
    topk_weights: list[Array]

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def hidden(self) -> int:
        return int(self.tokens[0].shape[1])


def random_problem(
    seed: int, num_ranks: int, experts_per_rank: int, max_tokens: int, hidden: int, topk: int, dtype: Any = np.float32
) -> Problem:
    """Any number of tokens up to max_tokens on each rank, distinct experts, some choices dropped."""
    random = np.random.default_rng(seed)
    num_experts = num_ranks * experts_per_rank
    tokens, indices, weights = [], [], []
    for _ in range(num_ranks):
        num_tokens = int(random.integers(0, max_tokens + 1))
        tokens.append(random.standard_normal((num_tokens, hidden)).astype(dtype))
        chosen = np.array([random.permutation(num_experts)[:topk] for _ in range(num_tokens)], np.int64)
        chosen = chosen.reshape(num_tokens, topk)
        chosen[random.random(chosen.shape) < 0.1] = -1
        indices.append(chosen)
        weights.append(random.random((num_tokens, topk)).astype(np.float32))
    return Problem(num_experts, max_tokens, tokens, indices, weights)


def rows_of_expert(problem: Problem, expert: int) -> list[tuple[int, int, int]]:
    """(source rank, token, k) of the rows that come to an expert, in the order in which they come."""
    return [
        (rank, token, k)
        for rank in range(problem.num_ranks)
        for token, choices in enumerate(problem.topk_idx[rank])
        for k, choice in enumerate(choices)
        if choice == expert
    ]


def rows_of_rank(problem: Problem, rank: int) -> list[tuple[int, int]]:
    """(source rank, token) of the rows that come to a rank, in the order in which they come."""
    first = rank * problem.experts_per_rank
    last = first + problem.experts_per_rank
    return [
        (source, token)
        for source in range(problem.num_ranks)
        for token, choices in enumerate(problem.topk_idx[source])
        if any(first <= choice < last for choice in choices)
    ]


def expert_factor(expert: int) -> float:
    """The experts of the tests multiply by this: a small power of two and a half, exact in every float format."""
    return (1 + expert % 3) * 0.5


def combined(problem: Problem, rank: int) -> Array:
    """What returns to a rank after experts that multiply by expert_factor: [B, H] in fp64."""
    tokens = problem.tokens[rank].astype(np.float64)
    result = np.zeros_like(tokens)
    for token, choices in enumerate(problem.topk_idx[rank]):
        for k, choice in enumerate(choices):
            if choice >= 0:
                weight = float(problem.topk_weights[rank][token, k])
                result[token] += weight * expert_factor(int(choice)) * tokens[token]
    return result
