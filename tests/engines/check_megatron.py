# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's own flex dispatcher over DeepEP, forward and backward, a rank per process.

    python tests/engines/check_megatron.py [--device cuda] [--tensor-ranks 2] [--tokens 24]

It agrees with a layer without communication, and on GPUs with Megatron's all-to-all dispatcher, which needs CUDA. Ranks
may share a GPU. Nothing of Megatron is changed.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

import ranks
import wheels

if ranks.is_rank():
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, EXPERTS, TOPK = 64, 8, 2


def config_of(
    kind: str, tensor_ranks: int, expert_ranks: int, device: str, hidden: int = HIDDEN, **settings: Any
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type=kind,
        moe_router_dtype="fp32",
        moe_permute_fusion=False,
        tensor_model_parallel_size=tensor_ranks,
        expert_model_parallel_size=expert_ranks,
        expert_tensor_parallel_size=tensor_ranks,
        sequence_parallel=tensor_ranks > 1,
        use_cpu_initialization=device == "cpu",
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        **settings,
    )


def layer(dispatcher: Any, x: Any, routing: Any, probs: Any, first_expert: int, part: float, **overlap: Any) -> Any:
    """Expert e multiplies its rows by (e + 1) / EXPERTS and by their weights; the calls are those of MoELayer.

    Of an expert that is spread over tensor-parallel ranks, each has the part 1 / ranks.
    """
    hidden, weights = dispatcher.dispatch_preprocess(x, routing, probs)
    hidden, weights = dispatcher.token_dispatch(hidden, weights, **overlap)
    rows, counts, row_weights = dispatcher.dispatch_postprocess(hidden, weights)
    factors = torch.arange(first_expert, first_expert + len(counts), device=x.device) + 1.0
    factors = factors.repeat_interleave(counts.to(x.device)) * part / EXPERTS
    rows = rows * (factors * row_weights).unsqueeze(-1).to(rows.dtype)
    return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows), **overlap))


def plain_layer(x: Any, probs: Any) -> Any:
    factors = (torch.arange(EXPERTS, device=x.device) + 1.0) / EXPERTS
    return x * (probs * factors).sum(dim=1).view(-1, 1, 1)


def run_rank() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensor-ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    size, tensor_ranks = dist.get_world_size(), options.tensor_ranks
    expert_ranks = size // tensor_ranks
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks,
        expert_model_parallel_size=expert_ranks,
        expert_tensor_parallel_size=tensor_ranks,
    )
    assert fused_a2a.HAVE_DEEP_EP
    groups = get_default_pg_collection()
    local = EXPERTS // expert_ranks
    first = parallel_state.get_expert_model_parallel_rank() * local
    worst: dict[str, float] = {}
    random = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        tokens = options.tokens * (1 + step)
        x = torch.randn(tokens, 1, HIDDEN, generator=random).bfloat16().to(options.device)
        scores = torch.rand(tokens, EXPERTS, generator=random)
        routing = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, scores.topk(TOPK).indices, True)
        probs = torch.where(routing, scores, 0.0).to(options.device)
        routing, results = routing.to(options.device), {}
        kinds = {"flex": MoEFlexTokenDispatcher, "alltoall": MoEAlltoAllTokenDispatcher, "plain": None}
        for kind, dispatcher_class in kinds.items():
            if kind == "alltoall" and options.device == "cpu":
                continue
            own_x, own_probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
            if dispatcher_class is None:
                result = plain_layer(own_x, own_probs)
            else:
                backend: dict[str, Any] = {"moe_flex_dispatcher_backend": "deepep"} if kind == "flex" else {}
                config = config_of(kind, tensor_ranks, expert_ranks, options.device, **backend)
                dispatcher = dispatcher_class(local, list(range(first, first + local)), config, groups)
                overlap = {"async_finish": step > 0, "allocate_on_comm_stream": step > 1} if kind == "flex" else {}
                result = layer(dispatcher, own_x, routing, own_probs, first, 1 / tensor_ranks, **overlap)
            result.float().square().sum().backward()
            results[kind] = result.detach(), own_x.grad, own_probs.grad
        for kind in results:
            for name, one, other in zip(("result", "tokens", "probs"), results["flex"], results[kind], strict=True):
                one, other = (torch.where(routing, of, 0) if name == "probs" else of.float() for of in (one, other))
                error = float((one - other).norm() / other.norm())
                assert error < 1e-2, f"step {step}, {name} beside {kind}: {error}"
                worst[kind] = max(worst.get(kind, 0.0), error)
    version = wheels.MEGATRON.version
    beside = ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items() if kind != "flex")
    print(f"Megatron-Core {version}'s flex dispatcher agrees; largest error beside {beside}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if ranks.is_rank():
        run_rank()
    else:
        ranks.main("megatron", lambda: ranks.run_ranks(__file__, [wheels.folder(wheels.MEGATRON)]))
