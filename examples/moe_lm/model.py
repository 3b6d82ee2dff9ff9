# SPDX-License-Identifier: Apache-2.0
"""A small language model over bytes, with Mixture-of-Experts layers; the layers' kind is the caller's choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and of a step."""

    num_experts: int = 8
    num_topk: int = 2
    hidden: int = 64
    num_heads: int = 4
    num_layers: int = 2
    length: int = 64
    num_sequences: int = 16


def make_expert(shape: Shape, layer: int, number: int) -> nn.Module:
    """Expert `number` of a layer, with weights that depend on these numbers alone: any rank can make it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * (layer + 1) + number)
        return nn.Sequential(
            nn.Linear(shape.hidden, 2 * shape.hidden), nn.GELU(), nn.Linear(2 * shape.hidden, shape.hidden)
        )


class PlainMoe(nn.Module):
    """The layer in one process, without any exchange: every expert sees the tokens that chose it."""

    def __init__(self, shape: Shape, gate: nn.Module, layer: int) -> None:
        super().__init__()
        self.num_topk = shape.num_topk
        self.gate = gate
        self.experts = nn.ModuleList(make_expert(shape, layer, number) for number in range(shape.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        chosen, topk_idx = self.gate(tokens).topk(self.num_topk, dim=-1)
        weights = chosen.softmax(dim=-1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, k = (topk_idx == number).nonzero(as_tuple=True)
            result = result.index_add(0, token, expert(tokens[token]) * weights[token, k, None])
        return result.view_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.project = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.project(x).view(batch, length, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2)) * (hidden // self.num_heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class Model(nn.Module):
    """Bytes [B, T] -> logits [B, T, 256]. make_moe(shape, gate, layer) makes the expert layers."""

    def __init__(self, shape: Shape, make_moe: Callable[[Shape, nn.Module, int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, shape.hidden)
        self.position = nn.Parameter(torch.randn(shape.length, shape.hidden) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(shape.hidden) for _ in range(2 * shape.num_layers + 1))
        self.attentions = nn.ModuleList(Attention(shape) for _ in range(shape.num_layers))
        gates = [nn.Linear(shape.hidden, shape.num_experts, bias=False) for _ in range(shape.num_layers)]
        self.head = nn.Linear(shape.hidden, 256)
        self.moes = nn.ModuleList(make_moe(shape, gate, layer) for layer, gate in enumerate(gates))

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs) + self.position
        for layer, (attention, moe) in enumerate(zip(self.attentions, self.moes, strict=True)):
            x = x + attention(self.norms[2 * layer](x))
            x = x + moe(self.norms[2 * layer + 1](x))
        return self.head(self.norms[-1](x))

    def loss_sum(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The sum over tokens of the cross entropy, in nats."""
        return functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
