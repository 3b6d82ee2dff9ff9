# SPDX-License-Identifier: Apache-2.0
"""The model in plain torch: log-probabilities of the fixed text, and how much faults and roundings change them.

Servers round to bf16 after each operation, and so does this. A variant has a fault, or one rounding more, in each MoE
layer. All variants go through the layers together, so each expert's weights are made once.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_e2e.model import HEAD
from vllm_e2e import faults, reference, runs
from vllm_e2e.control import ROUNDING
from vllm_e2e.models import VOCABULARY, Shape
from vllm_e2e.report import difference
from vllm_e2e.weights import Weights

EPSILON, THETA = 1e-6, 1000000.0  # as in models.config_of
FAULTY_TOKEN = 1  # of each text: the first one that has another token before it
VARIANTS = ("", ROUNDING, *runs.FAULTS)  # "": the model as it is


def normed(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm, whose weights are all 1."""
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=EPSILON).bfloat16()


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [N, heads, T, HEAD], by the positions 0..T-1."""
    steps = THETA ** (-torch.arange(0, HEAD, 2, device=x.device) / HEAD)
    angles = torch.outer(torch.arange(x.shape[2], device=x.device), steps)
    low, high = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).bfloat16()


class Plain:
    def __init__(self, shape: Shape, num_ranks: int, device: torch.device) -> None:
        self.shape, self.num_ranks, self.device = shape, num_ranks, device
        self.weights = Weights(shape, is_fp8=False)

    def weight(self, name: str, rows: int, columns: int) -> torch.Tensor:
        made = torch.empty((rows, columns), dtype=torch.bfloat16, device=self.device)
        self.weights.fill(name, made)
        return made

    def attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """x [N, T, hidden]."""
        shape, base = self.shape, f"model.layers.{layer}.self_attn."
        sizes = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        q, k, v = (
            (x @ self.weight(f"{base}{name}_proj.weight", heads * HEAD, shape.hidden).T)
            .unflatten(-1, (heads, HEAD))
            .transpose(1, 2)
            for name, heads in sizes.items()
        )
        made = torch.nn.functional.scaled_dot_product_attention(
            rotated(normed(q)), rotated(normed(k)), v, is_causal=True, enable_gqa=True
        )
        output = self.weight(f"{base}o_proj.weight", shape.hidden, shape.heads * HEAD)
        return made.transpose(1, 2).flatten(2) @ output.T

    def experts(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """x [V, N, T, hidden]: of N texts, for each of the V VARIANTS."""
        router = self.weight(f"model.layers.{layer}.mlp.gate.weight", self.shape.experts, self.shape.hidden)
        shares, ids = (x @ router.T).float().softmax(-1).topk(self.shape.topk)
        shares = shares / shares.sum(-1, keepdim=True)
        for place, fault in enumerate(VARIANTS):
            for text in range(x.shape[1]):
                rows = ids[place, text, FAULTY_TOKEN:]
                rows.copy_(faults.misrouted(rows, fault, self.shape.experts, self.num_ranks))
                rows = shares[place, text, FAULTY_TOKEN:]
                rows.copy_(faults.misweighted(rows, fault))
        expert = lambda number: self.weights.expert(layer, number, self.device)  # noqa: E731
        flat = (x.flatten(0, 2), ids.flatten(0, 2), shares.flatten(0, 2))
        made = reference.moe_layer(*flat, expert, is_fp8=False).bfloat16().view_as(x)
        made[VARIANTS.index(ROUNDING)] = reference.rounded_again(made[VARIANTS.index(ROUNDING)])
        return made

    def scores(self, texts: torch.Tensor) -> torch.Tensor:
        """texts [N, T]: log-probabilities [V, N, T - 1] of all tokens but the first, for each of VARIANTS."""
        torch.manual_seed(1)
        texts = texts.to(self.device)
        embedding = self.weight("model.embed_tokens.weight", VOCABULARY, self.shape.hidden)
        x = embedding[texts].expand(len(VARIANTS), *texts.shape, -1).contiguous()
        del embedding
        for layer in range(self.shape.layers):
            x = x + self.attention(normed(x).flatten(0, 1), layer).view_as(x)
            x = x + self.experts(normed(x), layer)
        logits = normed(x[:, :, :-1]) @ self.weight("lm_head.weight", VOCABULARY, self.shape.hidden).T
        chances = torch.stack([one.float().log_softmax(-1) for one in logits])
        return chances.gather(-1, texts[:, 1:].expand(len(VARIANTS), -1, -1).unsqueeze(-1)).squeeze(-1).cpu()


def calibration(shape: Shape, num_ranks: int, device: torch.device, texts: list[list[int]]) -> dict[str, Any]:
    """The texts' log-probabilities, and what one rounding more per MoE layer and each fault change of them."""
    found = Plain(shape, num_ranks, device).scores(torch.tensor(texts)).tolist()
    made = [difference(one, found[0]) for one in found]
    changes = {name: [one.mean, one.most] for name, one in zip(VARIANTS, made, strict=True) if name}
    return {"scores": found[0], "changes": changes}
