# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's ncclep dispatcher through TransformerEngine on Crossdock, on GPUs, a rank per process.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python gpu_megatron.py LIBRARY MEGATRON ENGINE [CASE...]

gpu.py starts it, once per rank, in the environment of gpu_transformer_engine.py. LIBRARY: libtransformer_engine.so.
MEGATRON: a folder with Megatron-Core's files. ENGINE: a folder with TransformerEngine's
transformer_engine/pytorch/ep.py. The files are unchanged, but see without_scales. In place of TransformerEngine's
compiled module, which no wheel contains, there is transformer_engine_extension.py. --list prints the cases.

The program calls ep_bootstrap before Megatron's first dispatch, and Megatron reuses that group: the call of
Megatron-Core 0.19.2 lacks num_topk, which TransformerEngine requires since 2.19.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import stand_ins
from gpu_transformer_engine import Engine
from transformer_engine_extension import Extension

HIDDEN, MOST, LAYERS, STEPS, BOUND = 1024, 64, 2, 4, 2e-2
FUSED = "NVTE_EP_FUSED_PREPARE_DISPATCH"


@dataclass(frozen=True)
class Case:
    """One way to configure the dispatcher."""

    settings: dict[str, Any] = field(default_factory=dict)
    tensor_ranks: int = 1
    is_fused: bool = False


STATIC = {"use_transformer_engine_op_fuser": True, "moe_grouped_gemm": True, "moe_ncclep_static_shape": True}
CASES = {
    "steps": Case(),
    # Experts get the whole receive buffer, with each expert's rows aligned to 256, without a host synchronization.
    "static_shape": Case(STATIC),
    # Two ranks share each expert.
    "tensor_parallel": Case(tensor_ranks=2),
    # nvte_ep_prepare_and_dispatch instead of two calls, which users opt into by the variable FUSED.
    "fused": Case(is_fused=True),
}


def without_scales(name: str, *, mutates_args: Any, real: Any = torch.library.custom_op, **options: Any) -> Any:
    """Registers an operator of ep.py without the scales of MXFP8 in mutates_args.

    Before 2.13, torch raises an IndexError if a call omits an argument of mutates_args (pytorch issue 176078), and
    ep.py omits the scales of bf16 rows.
    """
    written = [argument for argument in mutates_args if not argument.endswith("scale_inv")]
    return real(name, mutates_args=written, **options)


class Megatron:
    """Its modules, over TransformerEngine's ep.py."""

    def __init__(self, megatron: str, engine: str, extension: Extension) -> None:
        sys.path.insert(0, megatron)
        # Megatron first loads as without TransformerEngine, of which only EP is here. Then what uses EP loads again.
        from megatron.core.transformer.moe import fused_a2a, token_dispatcher

        class QuantizedTensor:
            """For isinstance; no such tensor exists here."""

        sys.modules["transformer_engine_torch"] = extension
        known = {"transformer_engine.pytorch.quantized_tensor": {"QuantizedTensor": QuantizedTensor}}
        with mock.patch("torch.library.custom_op", without_scales):
            [self.ep] = stand_ins.load(Path(engine), "transformer_engine.pytorch", ["ep"], known)
        importlib.reload(fused_a2a)
        self.dispatchers = importlib.reload(token_dispatcher)
        assert fused_a2a.HAVE_TE_EP

        import check_megatron

        self.check = check_megatron


class Layers:
    """MoE layers without a router, one after another: expert e multiplies its rows by (e + 1) / E and their weights."""

    def __init__(self, megatron: Megatron, case: Case) -> None:
        self.check, size = megatron.check, dist.get_world_size()
        parallel = self.check.parallel_state
        expert_ranks = size // case.tensor_ranks
        parallel.initialize_model_parallel(
            tensor_model_parallel_size=case.tensor_ranks,
            expert_model_parallel_size=expert_ranks,
            expert_tensor_parallel_size=case.tensor_ranks,
        )
        local = self.check.EXPERTS // expert_ranks
        first = parallel.get_expert_model_parallel_rank() * local
        topk = self.check.TOPK * case.tensor_ranks
        # Room for the worst routing: all tokens of all ranks to this rank, and all experts' rows aligned.
        alignment = 256 if case.settings else 1
        rows = max(topk * size * MOST, local * -(-size * MOST // alignment) * alignment)
        config = self.check.config_of(
            "flex",
            case.tensor_ranks,
            expert_ranks,
            "cuda",
            HIDDEN,
            moe_flex_dispatcher_backend="ncclep",
            moe_expert_rank_capacity_factor=rows / (topk * MOST),
            **case.settings,
        )
        groups = self.check.get_default_pg_collection()
        megatron.ep.ep_bootstrap(
            groups.tp_ep,
            num_experts=self.check.EXPERTS * case.tensor_ranks,
            max_tokens_per_rank=MOST,
            hidden_dim=HIDDEN,
            num_topk=topk,
            recv_capacity_per_rank=rows,
        )
        self.dispatchers = [
            megatron.dispatchers.MoEFlexTokenDispatcher(local, list(range(first, first + local)), config, groups)
            for _ in range(LAYERS)
        ]
        self.first, self.part, self.rows = first, 1 / case.tensor_ranks, rows

    def experts(self, rows: Any, counts: Any, weights: Any) -> Any:
        """Rows past the last expert's are zero."""
        ends = counts.cumsum(0)
        at = torch.arange(len(rows), device=rows.device)
        expert = (at[:, None] >= ends).sum(dim=1)
        is_row = at < ends[-1]
        factors = (expert + 1 + self.first) * self.part / self.check.EXPERTS
        factors = factors * torch.where(is_row, weights, 0.0)
        return torch.where(is_row[:, None], rows, 0.0) * factors[:, None].to(rows.dtype)

    def __call__(self, x: Any, routing: Any, probs: Any) -> Any:
        """The calls are those of MoELayer."""
        for dispatcher in self.dispatchers:
            hidden, weights = dispatcher.dispatch_preprocess(x, routing, probs)
            hidden, weights = dispatcher.token_dispatch(hidden, weights)
            rows, counts, weights = dispatcher.dispatch_postprocess(hidden, weights)
            made = dispatcher.combine_preprocess(self.experts(rows, counts, weights))
            x = dispatcher.combine_postprocess(dispatcher.token_combine(made))
        return x

    def plain(self, x: Any, probs: Any) -> Any:
        """The same without communication."""
        for _ in self.dispatchers:
            x = self.check.plain_layer(x, probs).to(x.dtype)
        return x


def differences(layers: Layers, rank: int, step: int) -> list[str]:
    """Result and gradients of all layers beside the plain computation, with another routing in every step."""
    tokens = (MOST, 17, 48, 1)[(rank + step) % 4]
    random = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(tokens, 1, HIDDEN, generator=random).bfloat16().cuda()
    scores = torch.rand(tokens, layers.check.EXPERTS, generator=random)
    chosen = scores.topk(layers.check.TOPK).indices
    routing = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, chosen, True).cuda()
    probs = torch.where(routing, scores.cuda(), 0.0)
    results = []
    for is_plain in (False, True):
        own_x, own_probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
        result = layers.plain(own_x, own_probs) if is_plain else layers(own_x, routing, own_probs)
        result.float().square().sum().backward()
        assert own_x.grad is not None and own_probs.grad is not None
        results.append((result.detach().float(), own_x.grad.float(), torch.where(routing, own_probs.grad, 0.0)))
    wrong = []
    for name, found, expected in zip(("result", "tokens' gradient", "weights' gradient"), *results, strict=True):
        error = float((found - expected).norm() / expected.norm())
        if not error < BOUND:
            wrong.append(f"step {step}, {name}: the relative error is {error}")
    return wrong


def run_case(megatron: Megatron, extension: Extension, case: Case) -> None:
    os.environ[FUSED] = str(int(case.is_fused))
    extension.calls.clear()
    layers = Layers(megatron, case)
    # Raised after the last step: a rank that stops early would leave its peers waiting.
    wrong = [line for step in range(STEPS) for line in differences(layers, dist.get_rank(), step)]
    assert not wrong, "\n".join(wrong)
    assert all(dispatcher._comm_manager._recv_capacity == layers.rows for dispatcher in layers.dispatchers)
    layers.check.parallel_state.destroy_model_parallel()  # ends TransformerEngine's group, too
    dispatch = "ep_prepare_and_dispatch" if case.is_fused else "ep_prepare, ep_dispatch"
    steps = LAYERS * [dispatch, "ep_combine"] + LAYERS * ["ep_combine_bwd", "ep_dispatch_bwd"]
    assert extension.calls == ["ep_initialize", *STEPS * steps, "ep_shutdown"], extension.calls


def main() -> None:
    names = sys.argv[4:] or list(CASES)
    if "--list" in sys.argv:
        print("\n".join(CASES))
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    dist.init_process_group("nccl")
    said: Any = dist.new_group(backend="gloo")
    extension = Extension(Engine(sys.argv[1]))
    megatron = Megatron(sys.argv[2], sys.argv[3], extension)
    for name in names:
        if rank == 0:
            print(f"start   {name}", flush=True)
        found = ""
        try:
            run_case(megatron, extension, CASES[name])
            torch.cuda.synchronize()
        except BaseException:
            found = traceback.format_exc()
            print(f"rank {rank}: {found}", flush=True)  # at once: other ranks may hang
        every: list[Any] = [None] * size
        dist.all_gather_object(every, found, group=said)
        if rank == 0:
            print(f"{'FAILED' if any(every) else 'ok':7} {name}", flush=True)
        if any(every):
            os._exit(1)  # what a failed case left behind would spoil the next ones
    os._exit(0)


if __name__ == "__main__":
    main()
