# SPDX-License-Identifier: Apache-2.0
"""The model of vllm_e2e as a checkpoint: safetensors with Hugging Face's names, one file per layer."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_e2e import models, tokenizer
from vllm_e2e.models import VOCABULARY, Shape
from vllm_e2e.weights import Weights

HEAD = 128  # as in models.config_of
Tensors = dict[str, torch.Tensor]


def filled(weights: Weights, device: torch.device, sizes: dict[str, tuple[int, ...]]) -> Tensors:
    found = {name: torch.empty(size, dtype=torch.bfloat16, device=device) for name, size in sizes.items()}
    for name, tensor in found.items():
        weights.fill(name, tensor)
    return found


def ends(weights: Weights, device: torch.device) -> Tensors:
    size = (VOCABULARY, weights.shape.hidden)
    names: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": size,
        "lm_head.weight": size,
        "model.norm.weight": size[1:],
    }
    return filled(weights, device, names)


def layer(weights: Weights, number: int, device: torch.device) -> Tensors:
    shape, base = weights.shape, f"model.layers.{number}."
    queries, keys = shape.heads * HEAD, shape.kv_heads * HEAD
    found = filled(
        weights,
        device,
        {
            base + "input_layernorm.weight": (shape.hidden,),
            base + "post_attention_layernorm.weight": (shape.hidden,),
            base + "self_attn.q_norm.weight": (HEAD,),
            base + "self_attn.k_norm.weight": (HEAD,),
            base + "self_attn.q_proj.weight": (queries, shape.hidden),
            base + "self_attn.k_proj.weight": (keys, shape.hidden),
            base + "self_attn.v_proj.weight": (keys, shape.hidden),
            base + "self_attn.o_proj.weight": (shape.hidden, queries),
            base + "mlp.gate.weight": (shape.experts, shape.hidden),
        },
    )
    for expert in range(shape.experts):
        made, own = weights.expert(number, expert, device), f"{base}mlp.experts.{expert}."
        found[own + "gate_proj.weight"], found[own + "up_proj.weight"] = made.w13.chunk(2)
        found[own + "down_proj.weight"] = made.w2
    return found


def files(shape: Shape, device: torch.device) -> Iterator[tuple[str, Tensors]]:
    weights = Weights(shape, is_fp8=False)
    yield "ends.safetensors", ends(weights, device)
    for number in range(shape.layers):
        yield f"layer{number}.safetensors", layer(weights, number, device)


def save(tensors: Tensors, file: Path) -> int:
    """In the format of safetensors: the header's length, the header, the tensors. Returns the tensors' bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            out.write(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
    return end


def config(shape: Shape) -> str:
    return json.dumps(models.config_of(shape, is_fp8=False), indent=1)


def is_there(folder: Path, shape: Shape) -> bool:
    file = folder / "config.json"
    return file.is_file() and file.read_text() == config(shape)


def write(folder: Path, shape: Shape, device: torch.device) -> int:
    """Returns the bytes of all tensors. config.json comes last: then the model is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    places, total = {}, 0
    for file, tensors in files(shape, device):
        total += save(tensors, folder / file)
        places |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tokenizer.write(folder)
    (folder / "config.json").write_text(config(shape))
    return total
