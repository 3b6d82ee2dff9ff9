# SPDX-License-Identifier: Apache-2.0
"""Config and the functions that say how large buffers should be.

Crossdock sizes its memory by itself, so these are hints that fit what callers do with them: they compare sizes, and
hand them back to constructors.
"""

from __future__ import annotations

from crossdock.deep_ep.errors import require

SIZE_UNIT = 128
NODE_RANKS = 8  # what callers take for a node where they ask by a number of ranks alone


def align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _expect_positive(name: str, value: int) -> None:
    require(int(value) >= 1, lambda: f"{name} is {value}, allowed: 1 and more")


class Config:
    """DeepEP's tuning values. Results never depend on them."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        values = {
            "num_sms": num_sms,
            "num_max_nvl_chunked_send_tokens": num_max_nvl_chunked_send_tokens,
            "num_max_nvl_chunked_recv_tokens": num_max_nvl_chunked_recv_tokens,
            "num_max_rdma_chunked_send_tokens": num_max_rdma_chunked_send_tokens,
            "num_max_rdma_chunked_recv_tokens": num_max_rdma_chunked_recv_tokens,
        }
        for name, value in values.items():
            _expect_positive(name, value)
        self._num_sms = num_sms
        self._nvl_tokens = num_max_nvl_chunked_recv_tokens
        self._rdma_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for num_nvl_bytes: positive, growing with both arguments."""
        _expect_positive("hidden_bytes", hidden_bytes)
        _expect_positive("num_ranks", num_ranks)
        ranks = min(num_ranks, NODE_RANKS)
        return align(self._num_sms * ranks * self._nvl_tokens * (hidden_bytes + 256) // 2, SIZE_UNIT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for num_rdma_bytes; 0 where the ranks are those of one node."""
        _expect_positive("hidden_bytes", hidden_bytes)
        _expect_positive("num_ranks", num_ranks)
        if num_ranks <= NODE_RANKS:
            return 0
        nodes = -(-num_ranks // NODE_RANKS)
        return align(self._num_sms * nodes * self._rdma_tokens * (hidden_bytes + 256) // 2, SIZE_UNIT)


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """What two operations in flight hold of rows, headers and counts: grows with each argument."""
    values = {"num_max_dispatch_tokens_per_rank": max_tokens, "hidden": hidden, "num_ranks": num_ranks}
    for name, value in (values | {"num_experts": num_experts}).items():
        _expect_positive(name, value)
    rows = max(num_experts, num_ranks) * max_tokens
    return align(2 * (rows * (2 * hidden + 128) + 8 * (num_experts + num_ranks)), SIZE_UNIT)
