# SPDX-License-Identifier: Apache-2.0
"""vLLM's own classes over DeepEP, on CPUs, a rank per process: the managers, which make DeepEP's buffers, and what
dispatches and combines with them; files of the wheels of two versions, unchanged.

    python tests/engines/check_vllm.py [VERSION]

The rest of vLLM needs GPUs to be imported, so it is stood in for here.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import ranks
import wheels
from crossdock.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8
from stand_ins import load

HIDDEN, LOCAL, TOPK, MOST = 2048, 4, 4, 32
WHEELS = {wheel.version: wheel for wheel in (wheels.VLLM_OLDER, wheels.VLLM)}
MOE, COMMUNICATORS = "model_executor.layers.fused_moe.prepare_finalize", "distributed.device_communicators"
FILES = (
    *(f"{MOE}.deepep_{name}" for name in ("ht", "ll", "v2")),
    *(f"{COMMUNICATORS}.{name}" for name in ("base_device_communicator", "all2all")),
)


ENVIRONMENT = {  # vLLM's defaults
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
    "VLLM_DEEPEP_BUFFER_SIZE_MB": 1024,
    "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE": False,
    "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL": False,
    "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE": False,
    "VLLM_DEEPEP_V2_PREFER_OVERLAP": False,
    "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION": False,
}


class Modular:
    """vLLM's base class, which has no behaviour that counts here."""


class Delegate:
    """The reduction is left to the class; a token's rows are one row already."""


class Contiguous:
    def apply(self, fused_expert_output: Any, **_: Any) -> Any:
        return fused_expert_output


class Counts:
    def __init__(self, expert_num_tokens: Any, expert_num_tokens_cpu: Any) -> None:
        self.expert_num_tokens = expert_num_tokens

    @staticmethod
    def make_from_list(counts: list[int], device: Any) -> Counts:
        return Counts(torch.tensor(counts, dtype=torch.int32), None)


def quantise(x: Any, scale: Any, quant_dtype: Any, *_: Any, block_shape: Any = None, **__: Any) -> Any:
    return per_token_cast_to_fp8(x) if block_shape is not None else (x, None)


def globalised(ids: Any, ends: Any, offset: int, num_experts: int) -> Any:
    """vLLM's Triton kernel in torch; in place, as there."""
    rows = torch.arange(len(ids)).unsqueeze(1)
    ids.copy_(torch.where((ids >= 0) & (ids + offset < num_experts) & (rows < ends[-1]), ids + offset, -1))
    return ids


def stand_ins() -> dict[str, dict[str, Any]]:
    moe = "vllm.model_executor.layers.fused_moe"
    kernel = {
        "FusedMoEPrepareAndFinalizeModular": Modular,
        "ExpertTokensMetadata": Counts,
        "FusedMoEActivationFormat": SimpleNamespace(Standard=0, BatchedExperts=1),
        "PrepareResultType": tuple,
        "ReceiverType": tuple,
        "TopKWeightAndReduce": object,
        "FusedMoEExperts": object,
    }
    return {
        f"{moe}.modular_kernel": kernel,
        f"{moe}.topk_weight_and_reduce": {
            "TopKWeightAndReduceDelegate": Delegate,
            "TopKWeightAndReduceContiguous": Contiguous,
        },
        f"{moe}.utils": {"moe_kernel_quantize_input": quantise},
        f"{moe}.config": {"FusedMoEQuantConfig": object},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_rocm=lambda: False)},
        "vllm.forward_context": {"get_forward_context": lambda: SimpleNamespace(dp_metadata=None)},
        "vllm": {"envs": SimpleNamespace(**ENVIRONMENT)},
        "vllm.envs": ENVIRONMENT,
        "vllm.config": {
            "get_current_vllm_config": lambda: SimpleNamespace(
                parallel_config=SimpleNamespace(enable_fault_tolerance=True)
            )
        },
        "vllm.distributed.parallel_state": {
            "get_dp_group": lambda: SimpleNamespace(rank_in_group=dist.get_rank(), world_size=dist.get_world_size()),
            "get_tp_group": lambda: SimpleNamespace(rank_in_group=0, world_size=1),
            "in_the_same_node_as": lambda group, source_rank: [True] * group.size(),
        },
        "vllm.utils.flashinfer": {
            "has_flashinfer_nvlink_one_sided": lambda: False,
            "has_flashinfer_nvlink_two_sided": lambda: False,
        },
        "vllm.utils.import_utils": {
            "has_deep_ep": lambda: importlib.util.find_spec("deep_ep") is not None,
            "has_deep_ep_v2": lambda: importlib.util.find_spec("deep_ep") is not None,
        },
        "vllm.v1.worker.ubatching": {
            "dbo_enabled": lambda: False,
            "dbo_current_ubatch_id": lambda: 0,
            "dbo_get_previous_event": lambda _: None,
        },
    }


class Layer:
    """Expert e multiplies its rows by e + 1; random ids, so some repeat within a row."""

    def __init__(self, step: int, num_tokens: int, distinct: bool) -> None:
        self.rank, self.experts = dist.get_rank(), LOCAL * dist.get_world_size()
        random = torch.Generator().manual_seed(self.rank + 10 * step)
        self.x = torch.randn(num_tokens, HIDDEN, generator=random).bfloat16()
        self.ids = torch.randint(self.experts, (num_tokens, TOPK), generator=random)
        if distinct:
            self.ids = torch.rand(num_tokens, self.experts, generator=random).topk(TOPK, dim=1).indices
        self.weights = torch.rand(num_tokens, TOPK, generator=random) / 8

    def config(self, is_block: bool) -> Any:
        return SimpleNamespace(
            is_block_quantized=is_block,
            quant_dtype=torch.float8_e4m3fn if is_block else None,
            block_shape=[128, 128] if is_block else None,
            per_act_token_quant=False,
            is_scale_swizzled=False,
            mx_alignment=0,
            a1_scale=None,
            a1_gscale=None,
            a2_scale=None,
        )

    def run(self, which: Any, is_block: bool, do_async: bool) -> None:
        arguments = (self.x, self.weights, self.ids, self.experts, None, False, self.config(is_block))
        if do_async:
            receiver = which.prepare_async(*arguments)
            if isinstance(receiver, tuple):
                hook, receiver = receiver
                hook()
            found = receiver()
        else:
            found = which.prepare(*arguments)
        rows, scales, counts, ids, weights = found
        if scales is not None:
            flat = rows.reshape(-1, HIDDEN), scales.reshape(rows[..., 0].numel(), -1)
            rows = per_token_cast_back(*flat).view(rows.shape)
        first = self.rank * LOCAL
        if rows.dim() == 3:  # by expert; weights come with the sums
            made = rows.float() * (torch.arange(LOCAL) + first + 1)[:, None, None]
        else:
            is_here = (ids >= first) & (ids < first + LOCAL)
            made = torch.where(is_here, weights * (ids + 1), 0).sum(dim=1, keepdim=True) * rows.float()
        result = torch.full_like(self.x, torch.nan)
        rest = (result, made.bfloat16(), self.weights, self.ids, False, Delegate())
        if do_async:
            receiver = which.finalize_async(*rest)
            if isinstance(receiver, tuple):
                hook, receiver = receiver
                hook()
            receiver()
        else:
            which.finalize(*rest)
        expected = self.x.float() * (self.weights * (self.ids + 1)).sum(dim=1, keepdim=True)
        torch.testing.assert_close(result.float(), expected, rtol=8e-2, atol=8e-2)


def expect_no_larger_hidden_size(low: Any) -> None:
    """Low latency pads to the next size of a list; vLLM names the largest of it."""
    assert low.maybe_roundup_layer_hidden_size(2049) == 2560
    try:
        low.maybe_roundup_layer_hidden_size(8193)
    except ValueError as error:
        assert "8193" in str(error) and "8192" in str(error)
    else:
        raise AssertionError("a hidden size of 8193 was taken")


def run_rank() -> None:
    version = sys.argv[1]
    dist.init_process_group("gloo")
    size, first = dist.get_world_size(), dist.get_rank() * LOCAL
    high, low, second, _, all2all = load(wheels.folder(WHEELS[version]), "vllm", FILES, stand_ins())
    vars(second)["_globalize_recv_topk_idx"] = globalised
    expect_no_larger_hidden_size(low.DeepEPLLPrepareAndFinalize)
    group = dist.group.WORLD
    managers = [
        all2all.DeepEPHTAll2AllManager(group),
        all2all.DeepEPLLAll2AllManager(group),
        all2all.DeepEPV2All2AllManager(group),
    ]
    managers[2]._gin_checked = True  # that asks a GPU's NCCL
    sizes = {"max_num_tokens_per_dp_rank": MOST, "token_hidden_size": HIDDEN, "num_ep_ranks": size}
    forms = {"num_max_tokens_per_rank": 64, "hidden": HIDDEN, "num_topk": TOPK, "num_experts": LOCAL * size}
    normal = managers[0].get_handle({})
    fast = managers[1].get_handle({**sizes, "num_global_experts": LOCAL * size, "num_local_experts": LOCAL})
    elastic = managers[2].get_handle({**forms, "use_fp8_dispatch": False})
    assert managers[0].get_handle({}) is normal
    managers[0].set_num_sms(8)
    classes = {
        "high throughput": high.DeepEPHTPrepareAndFinalize(normal, size, 1, first),
        "low latency": low.DeepEPLLPrepareAndFinalize(fast, MOST, size, use_fp8_dispatch=False),
        "low latency, FP8": low.DeepEPLLPrepareAndFinalize(fast, MOST, size, use_fp8_dispatch=True),
    }
    for is_graph in (False, True):
        classes[f"version 2, {is_graph}"] = second.DeepEPV2PrepareAndFinalize(
            elastic, size, 1, first, LOCAL * size, TOPK, use_cudagraph=is_graph
        )
    for step in range(4):
        for name, which in classes.items():
            # Without knowledge of other ranks' batches, vLLM takes M for graphs from its own: equal ones.
            num_tokens = 7 + step if name.endswith("True") else (5, 0)[dist.get_rank() % 2] + 2 * step
            layer = Layer(step, num_tokens, distinct=name.startswith("version 2"))
            for is_block in (False, True):
                if name == "low latency" and is_block:
                    continue
                layer.run(which, is_block, do_async=step % 2 == 1)
    for manager in managers:
        manager.destroy()
    print(f"vLLM {version}: managers and classes agree", flush=True)
    dist.destroy_process_group()


def check() -> int:
    """Both versions; one that cannot be brought here does not keep the other from being checked."""
    failed, reasons = 0, []
    for version in sys.argv[1:] or list(WHEELS):
        try:
            folder = wheels.folder(WHEELS[version])
        except wheels.Skip as reason:
            reasons.append(reason)
            continue
        sys.argv[1:] = [version]
        failed |= ranks.run_ranks(__file__, [folder])
    if len(reasons) == len(WHEELS):
        raise reasons[0]
    for reason in reasons:
        print(f"vllm: skipped: {reason}")
    return failed


if __name__ == "__main__":
    if ranks.is_rank():
        run_rank()
    else:
        ranks.main("vllm", check)
