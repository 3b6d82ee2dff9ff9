# SPDX-License-Identifier: Apache-2.0
"""Arguments of low latency that some builds of DeepEP have, and engines pass with special options: what is refused."""

from __future__ import annotations

from crossdock.deep_ep.errors import require


def refuse_nvfp4() -> None:
    require(
        False,
        "use_nvfp4 is True, allowed: False, since rows are sent as bf16 or as 8-bit floats: start SGLang with "
        "--deepep-dispatcher-output-dtype bf16 (or fp8), vLLM with VLLM_DEEPEPLL_NVFP4_DISPATCH=0",
    )


def refuse_overlap() -> None:
    require(
        False,
        "overlap is True, allowed: False, since a combine takes rows that are complete and does not wait for "
        "src_signals or comp_signal: start SGLang without --enable-single-batch-overlap",
    )
