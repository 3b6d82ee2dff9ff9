# SPDX-License-Identifier: Apache-2.0
"""A stand-in for transformer_engine_torch, TransformerEngine's compiled extension, which no wheel contains.

It has the functions that transformer_engine.pytorch.ep calls for bf16 rows. As in the extension, each passes its
tensors to the library's nvte_ep_* functions, which do all communication. There are no windows, so no zero copy.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int, c_void_p
from types import ModuleType
from typing import Any

from gpu_transformer_engine import TYPES, Engine, GroupConfig, LayerConfig, Window, stream


class Extension(ModuleType):
    """The module transformer_engine_torch."""

    def __init__(self, engine: Engine) -> None:
        super().__init__("transformer_engine_torch")
        self.calls: list[str] = []
        self._engine = engine

    def _tensors(self, call: str, *tensors: Any) -> list[Any]:
        self.calls.append(call)
        for index, tensor in enumerate(tensors):
            if not tensor.is_contiguous():
                raise ValueError(f"{call}: tensor {index} of shape {tuple(tensor.shape)} is not contiguous")
        return [self._engine.tensor(tensor) for tensor in tensors]

    @staticmethod
    def _layer(top_k: int, alignment: int) -> Any:
        return byref(LayerConfig(ctypes.sizeof(LayerConfig), top_k, alignment))

    def ep_initialize(
        self,
        comm_ptr: int,
        group_name: str,
        num_experts: int,
        max_tokens_per_rank: int,
        max_recv_tokens_per_rank: int,
        hidden_dim: int,
        max_num_sms: int,
        max_token_dtype: Any,
        zero_copy: bool,
        num_topk: int,
        drop_on_overflow: bool,
    ) -> None:
        size = c_int()
        result = ctypes.CDLL("libnccl.so.2").ncclCommCount(c_void_p(comm_ptr), byref(size))
        if result != 0:
            raise RuntimeError(f"ncclCommCount of {group_name} failed: {result}")
        config = GroupConfig(
            struct_size=ctypes.sizeof(GroupConfig),
            ep_size=size.value,
            num_experts=num_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            max_recv_tokens_per_rank=max_recv_tokens_per_rank,
            hidden_dim=hidden_dim,
            num_comm_sms=max_num_sms,
            max_token_dtype=TYPES[max_token_dtype],
            zero_copy=int(zero_copy),
            num_topk=num_topk,
            drop_on_overflow=int(drop_on_overflow),
        )
        self.calls.append("ep_initialize")
        self._engine.ep_initialize(c_void_p(comm_ptr), byref(config))

    def ep_finalize(self) -> None:
        self.calls.append("ep_shutdown")
        self._engine.ep_shutdown()

    def ep_zero_copy_supported(self) -> bool:
        return False  # Python cannot read the windows of torch's symmetric memory

    def ep_get_zero_copy(self) -> bool:
        return False

    def ep_handle_mem_size(self, top_k: int, alignment: int) -> int:
        return int(self._engine.ep_handle_mem_size(self._layer(top_k, alignment)))

    def ep_prepare_and_dispatch(
        self,
        handle_mem: Any,
        topk_idx: Any,
        tokens: Any,
        topk_weights: Any,
        tokens_per_expert: Any,
        total_recv_tokens: Any,
        top_k: int,
        alignment: int,
        recv_tokens: Any = None,
        recv_topk_weights: Any = None,
        recv_scale_inv: Any = None,
        tokens_scale_inv: Any = None,
    ) -> list[Any]:
        """Two calls, or one if NVTE_EP_FUSED_PREPARE_DISPATCH is 1, as in the extension."""
        if recv_tokens is None or tokens_scale_inv is not None:
            raise NotImplementedError("eager mode and MXFP8: Megatron's dispatcher uses neither")
        is_fused = os.environ.get("NVTE_EP_FUSED_PREPARE_DISPATCH", "") == "1"
        memory, ids, rows, weights, received, row_weights, counts, total = self._tensors(
            "ep_prepare_and_dispatch" if is_fused else "ep_prepare, ep_dispatch",
            handle_mem,
            topk_idx,
            tokens,
            topk_weights,
            recv_tokens,
            recv_topk_weights,
            tokens_per_expert,
            total_recv_tokens,
        )
        none, layer = Window(), self._layer(top_k, alignment)
        moved = [memory, ids, rows, none, weights, none, received, none, row_weights, none]
        if is_fused:
            self._engine.ep_prepare_and_dispatch(*moved, counts, total, layer, stream())
        else:
            self._engine.ep_prepare(memory, ids, counts, total, layer, stream())
            self._engine.ep_dispatch(*moved, stream())
        return []

    def ep_combine(self, handle_mem: Any, expert_out: Any, result: Any) -> None:
        memory, rows, result = self._tensors("ep_combine", handle_mem, expert_out, result)
        self._engine.ep_combine(memory, rows, Window(), result, stream())

    def ep_combine_bwd(
        self,
        handle_mem: Any,
        grad: Any,
        grad_expert_out: Any,
        grad_scale_inv: Any = None,
        grad_expert_out_scale_inv: Any = None,
    ) -> None:
        if grad_scale_inv is not None:
            raise NotImplementedError("MXFP8: Megatron's dispatcher does not use it")
        memory, given, rows = self._tensors("ep_combine_bwd", handle_mem, grad, grad_expert_out)
        self._engine.ep_combine_bwd(memory, given, Window(), rows, Window(), stream())

    def ep_dispatch_bwd(
        self, handle_mem: Any, grad: Any, g_recv_topk_weights: Any, grad_tokens: Any, grad_topk_weights: Any
    ) -> None:
        memory, rows, row_weights, tokens, weights = self._tensors(
            "ep_dispatch_bwd", handle_mem, grad, g_recv_topk_weights, grad_tokens, grad_topk_weights
        )
        self._engine.ep_dispatch_bwd(memory, rows, Window(), row_weights, Window(), tokens, weights, stream())
