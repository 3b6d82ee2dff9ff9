# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core trains a small MoE GPT, a rank per process: the flex dispatcher over DeepEP beside the all-to-all one.

    python tests/engines/check_megatron_gpt.py [STEPS]

Losses agree at every step, also where the run with flex is interrupted and goes on from a checkpoint. Megatron is
unchanged, with its local layer spec; no option of it keeps out the CUDA calls of the all-to-all dispatcher, of
collectives' outputs and of the random numbers for dropout (which is 0), so these are stood in for.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ranks
import wheels

if ranks.is_rank():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.transformer_config import TransformerConfig

LAYERS, HIDDEN, HEADS, EXPERTS, TOPK = 2, 64, 4, 8, 2
BATCH, LENGTH, VOCABULARY, STEPS = 2, 32, 64, 12
ALL_TO_ALL: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
FLEX: dict[str, Any] = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}


def stand_in_for_cuda() -> None:
    """A CPU is its own and only stream."""
    stream = mock.MagicMock()
    calls = {
        "Stream": lambda *_, **__: stream,
        "current_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "current_device": lambda: torch.device("cpu"),
    }
    mock.patch.multiple("torch.cuda", **calls).start()
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    real = dist.all_to_all_single

    def with_lists(output: Any, rows: Any, output_split_sizes: Any, input_split_sizes: Any, **options: Any) -> Any:
        """Megatron makes lists of sizes where they are on a GPU, and leaves tensors on a CPU as they are."""
        received, sent = ([int(size) for size in part] for part in (output_split_sizes, input_split_sizes))
        return real(output, rows, received, sent, **options)

    mock.patch("torch.distributed.all_to_all_single", with_lists).start()


class Training:
    """All ranks begin with the same weights; each has its own sequences, which count up in steps of 3."""

    def __init__(self, **dispatcher: Any) -> None:
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOPK,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.01,
            expert_model_parallel_size=dist.get_world_size(),
            use_cpu_initialization=True,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            moe_permute_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            **dispatcher,
        )
        torch.manual_seed(7)
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
        self.model = GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> float:
        random = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=random)
        text = (first + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        hidden_later = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
        losses = self.model(text[:, :-1].contiguous(), positions, hidden_later, labels=text[:, 1:].contiguous())
        loss = losses.float().mean()
        loss.backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None and getattr(parameter, "allreduce", True):  # experts are of one rank each
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        return file.getvalue()

    def resume(self, saved: bytes) -> None:
        parts = torch.load(io.BytesIO(saved), weights_only=False)
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])


def run_rank() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    stand_in_for_cuda()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    assert fused_a2a.HAVE_DEEP_EP
    plain = Training(**ALL_TO_ALL)
    expected = [plain.step(number) for number in range(steps)]
    with mock.patch.object(fused_a2a, "get_buffer", wraps=fused_a2a.get_buffer) as buffers:
        flex = Training(**FLEX)
        losses = [flex.step(number) for number in range(steps // 2)]
        resumed = Training(**FLEX)
        resumed.resume(flex.saved())
        losses += [resumed.step(number) for number in range(steps // 2, steps)]
        # Dispatch and combine, forward and backward.
        assert buffers.call_count == 4 * LAYERS * steps, buffers.call_count
    worst = max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))
    assert worst <= 1e-3, f"{losses} beside {expected}"
    assert losses[-1] < 0.7 * losses[0], f"nothing was learnt: {losses}"
    version = wheels.MEGATRON.version
    print(f"Megatron-Core {version}: losses of {steps} steps agree with all-to-all's, by {worst:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if ranks.is_rank():
        run_rank()
    else:
        ranks.main("megatron_gpt", lambda: ranks.run_ranks(__file__, [wheels.folder(wheels.MEGATRON)], timeout_s=900))
