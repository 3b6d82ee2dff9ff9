# SPDX-License-Identifier: Apache-2.0
"""SGLang's own dispatchers over DeepEP, on CPUs, a rank per process; three files of the wheel, unchanged.

    python tests/engines/check_sglang.py

The rest of SGLang needs GPUs to be imported, so it is stood in for here.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ranks
import wheels
from crossdock.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8
from stand_ins import load

HIDDEN, LOCAL, TOPK, MOST = 512, 4, 4, 32
REAL = ("base", "deepep", "deepep_v2")
FOLDER = "sglang.srt.layers.moe.token_dispatcher"


class DeepEPMode(enum.Enum):
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"
    AUTO = "auto"

    def enable_normal(self) -> bool:
        return self != DeepEPMode.LOW_LATENCY

    def enable_low_latency(self) -> bool:
        return self != DeepEPMode.NORMAL

    def resolve(self, is_extend: bool) -> DeepEPMode:
        if self != DeepEPMode.AUTO:
            return self
        return DeepEPMode.NORMAL if is_extend else DeepEPMode.LOW_LATENCY

    def is_normal(self) -> bool:
        return self == DeepEPMode.NORMAL

    def is_low_latency(self) -> bool:
        return self == DeepEPMode.LOW_LATENCY


DispatcherOutputDtype = enum.Enum("DispatcherOutputDtype", "BF16 FP8 INT8 NVFP4 MXFP4 MXFP8")


class World:
    """What the stand-ins answer; tests change it between layers."""

    is_extend = True
    output_type: Any = None
    packed_scales = False
    resources = SimpleNamespace(buffers={})


def quantise(x: Any, block: int, column_major_scales: bool, scale_tma_aligned: bool, scale_ue8m0: bool) -> Any:
    """SGLang's FP8 kernel in torch: packed exponents, column by column, or fp32 row by row."""
    values, scales = per_token_cast_to_fp8(x)
    if not scale_ue8m0:
        return values, scales
    exponents = torch.ceil(torch.log2(scales))
    blocks = x.float().view(len(x), x.shape[1] // block, block)
    values = (blocks / torch.exp2(exponents).unsqueeze(2)).to(torch.float8_e4m3fn).view(x.shape)
    packed = (exponents + 127).to(torch.uint8).contiguous().view(torch.int32)
    return values, packed.t().contiguous().t()


def stand_ins() -> dict[str, dict[str, Any]]:
    def setting(value: Any) -> Any:
        return SimpleNamespace(get=lambda: value)

    envs = SimpleNamespace(
        SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=setting(MOST),
        SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=setting(MOST),
        SGLANG_DEEPEP_V2_NUM_SMS=setting(0),
        SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=setting(None),
        SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE=setting(False),
        SGLANG_ZBAL_LOCAL_MEM_SIZE=setting(0),
    )
    gemm = SimpleNamespace(ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_BLACKWELL=False, DEEPGEMM_SCALE_UE8M0=False)
    moe = SimpleNamespace(deepep_v2_mode="hybrid")
    parallel = SimpleNamespace(attn_dp_size=2, attn_cp_size=1, tp_size=1, tp_group=None)
    return {
        "sglang.srt.environ": {"envs": envs},
        "sglang.srt.layers": {"deep_gemm_wrapper": gemm},
        "sglang.srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: World.is_extend},
        "sglang.srt.layers.moe.utils": {
            "DeepEPMode": DeepEPMode,
            "DispatcherOutputDtype": DispatcherOutputDtype,
            "get_deepep_config": lambda: None,
            "get_deepep_output_dtype": lambda _: World.output_type,
            "get_deepep_v2_fp8_scale_format": lambda: SimpleNamespace(
                ue8m0=World.packed_scales, tma_aligned=World.packed_scales
            ),
            "is_tbo_enabled": lambda: False,
        },
        "sglang.srt.runtime_context": {
            "get_resources": lambda: World.resources,
            "get_exec": lambda: SimpleNamespace(moe=moe),
            "get_parallel": lambda: parallel,
        },
        "sglang.srt.utils": {
            "get_bool_env_var": lambda *_: False,
            "get_cuda_version": lambda: (13, 0),
            "is_blackwell": lambda: False,
            "is_flashinfer_available": lambda: False,
            "is_hip": lambda: False,
            "is_npu": lambda: False,
        },
        "sglang.kernels.ops.quantization.fp8_kernel": {"sglang_per_token_group_quant_fp8": quantise},
    }


class Layer:
    """Expert e multiplies its rows by e + 1; ids with -1, as of padded tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.rank, self.experts = dist.get_rank(), LOCAL * dist.get_world_size()
        random = torch.Generator().manual_seed(self.rank + 10 * num_tokens)
        self.x = torch.randn(num_tokens, HIDDEN, generator=random).bfloat16()
        self.ids = torch.rand(num_tokens, self.experts, generator=random).topk(TOPK, dim=1).indices.int()
        self.ids[num_tokens // 2 :: 5] = -1
        self.weights = torch.rand(num_tokens, TOPK, generator=random) / 8
        self.topk = SimpleNamespace(topk_ids=self.ids, topk_weights=self.weights)

    def numbers(self) -> Any:
        return torch.arange(LOCAL) + self.rank * LOCAL + 1

    def check(self, result: Any, what: str) -> None:
        factors = torch.where(self.ids >= 0, self.weights * (self.ids + 1), 0).sum(dim=1, keepdim=True)
        expected = self.x.float() * factors
        torch.testing.assert_close(result.float(), expected, rtol=6e-2, atol=6e-2, msg=lambda text: f"{what}: {text}")


def rows_of(values: Any, scales: Any) -> Any:
    if scales is None:
        return values
    flat = values.reshape(-1, HIDDEN), scales.reshape(values[..., 0].numel(), -1)
    return per_token_cast_back(*flat).view(values.shape)


def version_1(module: Any, use_fp8: bool, overlaps: bool) -> None:
    """One dispatcher in AUTO mode: prefill through the normal mode, decode in low latency, in turn."""
    World.output_type = DispatcherOutputDtype.FP8 if use_fp8 else DispatcherOutputDtype.BF16
    dispatcher = module.DeepEPDispatcher(
        dist.group.WORLD,
        TOPK,
        num_experts=LOCAL * dist.get_world_size(),
        num_local_experts=LOCAL,
        hidden_size=HIDDEN,
        params_dtype=torch.bfloat16,
        deepep_mode=DeepEPMode.AUTO,
        async_finish=overlaps,
        return_recv_hook=overlaps,
    )
    for step in range(4):
        World.is_extend = step % 2 == 0
        layer = Layer((7, 0)[dist.get_rank() % 2] + 3 * step if World.is_extend else 5 + step)
        got = dispatcher.dispatch(layer.x, layer.topk)
        rows = rows_of(got.hidden_states, got.hidden_states_scale).float()
        if World.is_extend:
            factors = torch.where(got.topk_ids >= 0, got.topk_weights * (got.topk_ids + layer.numbers()[0]), 0)
            output = rows * factors.sum(dim=1, keepdim=True)
            assert sum(got.num_recv_tokens_per_expert) % 128 == 0
            combined = module.DeepEPNormalCombineInput(output.bfloat16(), got.topk_ids, got.topk_weights)
        else:
            assert got.masked_m.shape == (LOCAL,)
            output = rows * layer.numbers()[:, None, None]
            combined = module.DeepEPLLCombineInput(output.bfloat16(), got.topk_ids, got.topk_weights)
        layer.check(dispatcher.combine(combined), f"step {step}")


def version_2(module: Any, use_fp8: bool, packed: bool) -> None:
    World.packed_scales = packed
    dispatcher = module.DeepEPv2Dispatcher(
        dist.group.WORLD, TOPK, LOCAL * dist.get_world_size(), LOCAL, HIDDEN, torch.bfloat16, use_fp8
    )
    for step in range(4):
        World.is_extend = step % 2 == 0
        layer = Layer((9, 0)[dist.get_rank() % 2] + 3 * step)
        got = dispatcher.dispatch(layer.x, layer.topk)
        rows = rows_of(got.hidden_states, got.hidden_states_scale).float()
        if got.is_expanded:
            ends = got.psum_num_recv_tokens_per_expert.tolist()
            starts = [0, *(-(-end // 128) * 128 for end in ends[:-1])]
            output = torch.zeros_like(rows)
            for number, start, end in zip(layer.numbers(), starts, ends, strict=True):
                output[start:end] = rows[start:end] * (number * got.topk_weights[start:end]).unsqueeze(1)
        else:
            factors = torch.where(got.topk_ids >= 0, got.topk_weights * (got.topk_ids + layer.numbers()[0]), 0)
            output = rows * factors.sum(dim=1, keepdim=True)
        combined = module.DeepEPv2CombineInput(output.bfloat16(), got.topk_weights)
        layer.check(dispatcher.combine(combined), f"version 2, step {step}")


def run_rank() -> None:
    dist.init_process_group("gloo")
    # What SGLang asks of the device.
    mock.patch("torch.cuda.get_device_properties", lambda *_, **__: SimpleNamespace(multi_processor_count=132)).start()
    _, first, second = load(wheels.folder(wheels.SGLANG), FOLDER, REAL, stand_ins())
    assert first.use_deepep and second.use_deepep_v2
    for use_fp8 in (False, True):
        for other in (False, True):
            version_1(first, use_fp8, overlaps=other)
            version_2(second, use_fp8, packed=other)
    print(f"SGLang {wheels.SGLANG.version}: dispatchers agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if ranks.is_rank():
        run_rank()
    else:
        ranks.main("sglang", lambda: ranks.run_ranks(__file__, [wheels.folder(wheels.SGLANG)]))
