# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core trains a small MoE GPT: the model, its data and one step, for check_megatron_gpt.py on CPUs and
gpu_megatron_gpt.py on GPUs.

Megatron is unchanged, with its local layer spec, DistributedDataParallel, bf16 optimizer with fp32 main parameters,
schedule and checkpoints. It needs neither TransformerEngine nor Apex; without TransformerEngine, the fused permutation
(moe_permute_fusion) does not exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

ALL_TO_ALL: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
FLEX: dict[str, Any] = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
SEED, WARM_UP_STEPS = 7, 10
# Of fixed routing: what the logits of the chosen experts get, far more than logits differ by, and how many rows the
# table of choices has.
MARGIN, CHOICES = 16.0, 4096


@dataclass(frozen=True)
class Shape:
    """The model, and the batch of each rank."""

    layers: int
    hidden: int
    heads: int
    ffn: int  # of each expert
    experts: int
    topk: int
    batch: int
    length: int
    vocabulary: int
    learning_rate: float


def join() -> None:
    """All ranks share the experts of a layer; each has its own sequences. Needs a process group."""
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )


def text_of(shape: Shape, step: int, rank: int) -> torch.Tensor:
    """Tokens that a model can learn to predict, but never all of: small ids are frequent, and every second token
    follows from the one that was drawn before it."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    size = shape.batch, shape.length + 1
    drawn = (shape.vocabulary * torch.rand(size, generator=random) ** 6).long()
    follows = torch.rand(size, generator=random) < 0.5
    follows[:, 0] = False
    return torch.where(follows, (5 * drawn.roll(1, dims=1) + 7) % shape.vocabulary, drawn)


def choices(shape: Shape, layer: int) -> torch.Tensor:
    """[CHOICES, experts]: MARGIN for topk experts of each row, otherwise 0."""
    random = torch.Generator().manual_seed(layer)
    order = torch.rand((CHOICES, shape.experts), generator=random).argsort(1)
    return torch.zeros(CHOICES, shape.experts).scatter_(1, order[:, : shape.topk], MARGIN)


class Training:
    """A model of random weights, the same for each Training: its experts differ from rank to rank.

    With fixed routing, a token's experts follow from its id and position, so that no rounding can change them. The
    router still learns the weights of the chosen experts.
    """

    def __init__(self, shape: Shape, is_fixed: bool = False, **settings: Any) -> None:
        self.shape = shape
        self.device = torch.device(torch.cuda.current_device())
        config = TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            ffn_hidden_size=shape.ffn,
            moe_ffn_hidden_size=shape.ffn,
            gated_linear_unit=True,
            activation_func=F.silu,
            normalization="RMSNorm",
            num_moe_experts=shape.experts,
            moe_router_topk=shape.topk,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.01,
            expert_model_parallel_size=dist.get_world_size(),
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            # These need TransformerEngine, Apex or a compiler.
            moe_permute_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            **settings,
        )
        # Routers draw their weights on the CPU, all others on the GPU.
        torch.manual_seed(SEED)
        tensor_parallel.model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
        spec = get_gpt_layer_local_spec(num_experts=shape.experts, moe_grouped_gemm=False, normalization="RMSNorm")
        model = GPTModel(config, spec, shape.vocabulary, shape.length, position_embedding_type="rope")
        model = Float16Module(config, model.to(self.device))
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, reduction, model)
        optimizer = OptimizerConfig(lr=shape.learning_rate, bf16=True, params_dtype=torch.bfloat16, weight_decay=0.01)
        self.optimizer = get_megatron_optimizer(optimizer, [self.model])
        config.no_sync_func = self.model.no_sync
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        self._positions = torch.arange(shape.length, device=self.device).expand(shape.batch, -1)
        later = torch.ones(shape.length, shape.length, dtype=torch.bool, device=self.device)
        self._hidden_later = torch.triu(later, 1)[None, None]
        self._rows = torch.empty(0)
        if is_fixed:
            for module in self.model.modules():
                if isinstance(module, TopKRouter):
                    table = choices(shape, module.layer_number).to(self.device)
                    module.gating = functools.partial(self._gating, module.gating, table)

    def _gating(self, gating: Callable[[torch.Tensor], torch.Tensor], table: torch.Tensor, x: Any) -> torch.Tensor:
        logits = gating(x)
        return logits + table[self._rows].view_as(logits)

    def step(self, number: int) -> torch.Tensor:
        """Forward, backward and update; returns the mean loss of this rank's tokens, which is on the GPU."""
        text = text_of(self.shape, number, dist.get_rank()).to(self.device)
        # The model's layers have the positions first.
        self._rows = ((31 * text[:, :-1] + self._positions) % CHOICES).T.reshape(-1)

        def forward(_: Any, model: Any) -> tuple[torch.Tensor, Any]:
            tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            return model(tokens, self._positions, self._hidden_later, labels=labels), mean

        def mean(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = losses.float().mean()
            return loss, loss.detach().clone()

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        [loss] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=[self.model],
            num_microbatches=1,
            seq_length=self.shape.length,
            micro_batch_size=self.shape.batch,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.shape.learning_rate * min(1.0, (number + 1) / WARM_UP_STEPS)
        is_done, _, _ = self.optimizer.step()
        assert is_done
        return loss

    def _state(self, is_loading: bool) -> dict[str, Any]:
        model = self.model.module.sharded_state_dict()
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading)}

    def save(self, folder: Path) -> None:
        """A checkpoint of all ranks, in Megatron's format of torch.distributed.checkpoint."""
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        # Megatron logs how much memory a process has, and needs psutil for that alone.
        with mock.patch.object(filesystem_async, "_process_memory", lambda: 0):
            dist_checkpointing.save(self._state(is_loading=False), str(folder))

    def resume(self, folder: Path) -> None:
        parts = dist_checkpointing.load(self._state(is_loading=True), str(folder))
        self.model.module.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])


def losses_of_all(losses: list[torch.Tensor]) -> list[list[float]]:
    """For each step the losses of all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [float(loss) for loss in losses])
    return [list(step) for step in zip(*every, strict=True)]
