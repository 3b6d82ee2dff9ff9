# SPDX-License-Identifier: Apache-2.0
"""Config, and the functions that return sizes for buffers.

Crossdock sizes its own memory, so these are hints for callers, which compare sizes and pass them to constructors.
"""

from __future__ import annotations

from crossdock.deep_ep.checks import check_counts, refuse

SIZE_UNIT = 128
MOST_SMS = 1 << 16  # more than any device has
NODE_RANKS = 8  # what callers take for a node where they ask by a number of ranks alone


def align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Config:
    """DeepEP's tuning values, of which num_sms has an effect, on GPUs. Results never depend on them."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        check_counts(
            1,
            num_sms=num_sms,
            num_max_nvl_chunked_send_tokens=num_max_nvl_chunked_send_tokens,
            num_max_nvl_chunked_recv_tokens=num_max_nvl_chunked_recv_tokens,
            num_max_rdma_chunked_send_tokens=num_max_rdma_chunked_send_tokens,
            num_max_rdma_chunked_recv_tokens=num_max_rdma_chunked_recv_tokens,
        )
        self._num_sms = num_sms
        self._nvl_tokens = num_max_nvl_chunked_recv_tokens
        self._rdma_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for num_nvl_bytes: positive, growing with both arguments."""
        check_counts(1, hidden_bytes=hidden_bytes, num_ranks=num_ranks)
        ranks = min(num_ranks, NODE_RANKS)
        return align(self._num_sms * ranks * self._nvl_tokens * (hidden_bytes + 256) // 2, SIZE_UNIT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for num_rdma_bytes; 0 where the ranks are those of one node."""
        check_counts(1, hidden_bytes=hidden_bytes, num_ranks=num_ranks)
        if num_ranks <= NODE_RANKS:
            return 0
        nodes = -(-num_ranks // NODE_RANKS)
        return align(self._num_sms * nodes * self._rdma_tokens * (hidden_bytes + 256) // 2, SIZE_UNIT)


def sms_of(config: Config | None, usual: int) -> int:
    """num_sms of a call's config, or the usual one."""
    if config is not None:
        if not isinstance(config, Config):
            refuse(f"config is of type {type(config).__name__}, expected a Config or None")
        usual = config._num_sms
    return int(min(usual, MOST_SMS))


# By bytes and number of ranks, the (M, H, E) that were asked for last. Callers make a buffer of that many bytes next.
_hinted: dict[tuple[int, int], tuple[int, int, int]] = {}
# By number of ranks, the bytes that were returned last: for callers that take more, as the normal mode's hint says.
_last: dict[int, int] = {}


def shape_of_hint(num_bytes: int, num_ranks: int) -> tuple[int, int, int] | None:
    """(M, H, E) of the last call of low_latency_bytes that returned num_bytes for num_ranks, or else of the
    last call for num_ranks if it returned fewer."""
    last = _last.get(num_ranks, num_bytes)
    return _hinted.get((num_bytes, num_ranks)) or _hinted.get((min(last, num_bytes), num_ranks))


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of rows, headers and counts of two operations in flight; grows with each argument."""
    sizes = {"hidden": hidden, "num_ranks": num_ranks, "num_experts": num_experts}
    check_counts(1, num_max_dispatch_tokens_per_rank=max_tokens, **sizes)
    rows = max(num_experts, num_ranks) * max_tokens
    num_bytes = align(2 * (rows * (2 * hidden + 128) + 8 * (num_experts + num_ranks)), SIZE_UNIT)
    if num_experts % num_ranks == 0 and hidden % 8 == 0:
        _hinted[num_bytes, num_ranks] = max_tokens, hidden, num_experts
        _last[num_ranks] = num_bytes
    return num_bytes
