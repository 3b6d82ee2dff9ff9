# SPDX-License-Identifier: Apache-2.0
"""Random weights of which each part can be made again at any place, with a router that rounding cannot change.

A tensor follows from its name, and an expert's tensors from layer and expert. So a rank compares with all experts
without asking another rank for them.

The router is wide: an embedding's first columns, one per expert, hold large values at a token's choices and zeros
elsewhere. Nothing that layers add reaches these columns (the rows of the matrices that write them are zero), so they
stay exact, and the routers only read them. Between the last choice and the best other expert there is a gap that no
rounding closes, so all backends route alike.

The output layer favours one token after each, so greedy tokens agree as well. Log-probabilities still depend on
everything that the layers compute.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import torch

from vllm_e2e.models import FP8_BLOCK, Shape

FP8 = torch.float8_e4m3fn
FP8_STD = 64.0  # of FP8 values; the scales bring them to the size of the bf16 weights
HIGHEST, LOWEST = 6.0, 3.0  # of a choice's column in an embedding, whose other columns have a standard deviation of 1
GAIN = 4.0  # of experts' second matrices, so that layers change what they get by about its own size
SUCCESSOR = 0.8
LAYER = re.compile(r"layers\.(\d+)\.")
EXPERT_PARTS = ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv")


def generator(device: torch.device, *words: object) -> torch.Generator:
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=6).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little"))


def layer_of(name: str) -> int:
    found = LAYER.search(name)
    if found is None:
        raise ValueError(f"the name {name!r} has no layer's number")
    return int(found[1])


def normal(shape: torch.Size, device: torch.device, *words: object) -> torch.Tensor:
    made = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return made.normal_(generator=generator(device, *words))


def quantised_normal(shape: torch.Size, device: torch.device, *words: object) -> torch.Tensor:
    return (normal(shape, device, *words) * FP8_STD).clamp_(-448, 448).to(FP8)


def scales(shape: torch.Size, device: torch.device, std: float, *words: object) -> torch.Tensor:
    """Block scales that differ, so that a wrong one shows."""
    made = torch.empty(shape, dtype=torch.float32, device=device)
    return made.uniform_(0.75, 1.25, generator=generator(device, *words)).mul_(std / FP8_STD)


@dataclass(frozen=True)
class Expert:
    """Of one expert, as its layer has them; scales only with FP8."""

    w13: torch.Tensor  # [2 * inner, hidden]: gate, then up
    w2: torch.Tensor  # [hidden, inner]
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both in fp32, as the kernels read them."""
        return dequantised(self.w13, self.w13_scale), dequantised(self.w2, self.w2_scale)


def dequantised(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return weight.float()
    whole = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return weight.float() * whole[: weight.shape[0], : weight.shape[1]]


class Weights:
    def __init__(self, shape: Shape, is_fp8: bool) -> None:
        self.shape, self.is_fp8 = shape, is_fp8

    # ---- experts ----

    def expert_part(self, part: str, layer: int, expert: int, device: torch.device) -> torch.Tensor:
        hidden, inner, words = self.shape.hidden, self.shape.inner, (part, layer, expert)
        rows, columns = (2 * inner, hidden) if part.startswith("w13") else (hidden, inner)
        std = (GAIN if part.startswith("w2_") else 1.0) / columns**0.5
        if part.endswith("scale_inv"):
            blocks = torch.Size((-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))
            return scales(blocks, device, std, *words)
        size = torch.Size((rows, columns))
        made = quantised_normal(size, device, *words) if self.is_fp8 else normal(size, device, *words).mul_(std)
        if part == "w2_weight":
            made[: self.shape.experts].zero_()
        return made

    def expert(self, layer: int, expert: int, device: torch.device) -> Expert:
        parts = EXPERT_PARTS if self.is_fp8 else EXPERT_PARTS[:2]
        return Expert(*(self.expert_part(part, layer, expert, device) for part in parts))

    # ---- all other tensors ----

    def embedding(self, size: torch.Size, device: torch.device) -> torch.Tensor:
        made = normal(size, device, "embedding")
        experts, topk = self.shape.experts, self.shape.topk
        order = torch.rand((size[0], experts), device=device, generator=generator(device, "choices")).argsort(1)
        levels = torch.linspace(HIGHEST, LOWEST, topk, device=device, dtype=made.dtype).expand(size[0], topk)
        made[:, :experts].zero_()
        return made.scatter_(1, order[:, :topk], levels)

    def router(self, size: torch.Size, layer: int, device: torch.device) -> torch.Tensor:
        """Each layer reads the columns in another order, so a token's experts differ from layer to layer."""
        experts = torch.arange(size[0], device=device)
        made = torch.zeros(size, dtype=torch.bfloat16, device=device)
        made[experts, (experts + 37 * layer) % size[0]] = 1
        return made

    def head(self, size: torch.Size, device: torch.device) -> torch.Tensor:
        before = self.embedding(size, device)[successors(size[0], device).argsort()]
        return (normal(size, device, "head") + SUCCESSOR * before).mul_(size[1] ** -0.5)

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter that is no expert's."""
        device = tensor.device
        if "norm" in name.split(".")[-2]:
            tensor.fill_(1)
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(self.embedding(tensor.shape, device))
        elif name.endswith("lm_head.weight"):
            tensor.copy_(self.head(tensor.shape, device))
        elif name.endswith("mlp.gate.weight"):
            tensor.copy_(self.router(tensor.shape, layer_of(name), device))
        elif name.endswith("weight_scale_inv"):
            tensor.copy_(scales(tensor.shape, device, (FP8_BLOCK * tensor.shape[-1]) ** -0.5, name))
        elif tensor.dim() < 2 or not tensor.is_floating_point():
            tensor.zero_()
        else:
            is_fp8 = tensor.dtype == FP8
            made = quantised_normal(tensor.shape, device, name) if is_fp8 else normal(tensor.shape, device, name)
            tensor.copy_(made if is_fp8 else made.mul_(tensor.shape[-1] ** -0.5))
            if name.endswith("o_proj.weight"):
                tensor[: self.shape.experts].zero_()

    def fill_experts(self, name: str, tensor: torch.Tensor, first: int) -> None:
        """A parameter [local experts, ...] of a rank whose first expert is `first`."""
        part, layer = name.rsplit(".", 1)[-1], layer_of(name)
        for index in range(tensor.shape[0]):
            tensor[index].copy_(self.expert_part(part, layer, first + index, tensor.device))


def successors(vocabulary: int, device: torch.device) -> torch.Tensor:
    """The favoured token after each: a permutation, since the factor has no divisor in common with the vocabulary."""
    return (torch.arange(vocabulary, device=device) * 7919 + 12345) % vocabulary
