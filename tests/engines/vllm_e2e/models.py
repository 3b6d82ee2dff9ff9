# SPDX-License-Identifier: Apache-2.0
"""The models: Qwen3-MoE's architecture in a few shapes, of which vLLM gets nothing but config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 32000
FP8_BLOCK = 128


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    experts: int
    topk: int
    inner: int  # of an expert
    heads: int
    kv_heads: int


MODELS = {
    "small": Shape(2048, 8, 128, 8, 768, 16, 4),
    "deep": Shape(7168, 4, 256, 8, 2048, 56, 8),
    "tiny": Shape(2048, 2, 16, 4, 256, 16, 4),
}


def config_of(shape: Shape, is_fp8: bool) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.topk,
        "moe_intermediate_size": shape.inner,
        "intermediate_size": 4 * shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if is_fp8:  # routers stay in bf16, as in published FP8 models
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(shape.layers))],
        }
    return config


def write(folder: Path, model: str, is_fp8: bool) -> Path:
    path = folder / f"model-{model}{'-fp8' if is_fp8 else ''}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(MODELS[model], is_fp8), indent=1))
    return path
