# SPDX-License-Identifier: Apache-2.0
"""Combines that send rows while others are computed: Handle.set_overlap, and low_latency_combine(overlap=True), called
as SGLang calls it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import crossdock as ep
from crossdock import deep_ep

RANKS, EXPERTS, TOKENS, HIDDEN, TOPK = 2, 8, 6, 256, 4
LOCAL, SLOTS = EXPERTS // RANKS, RANKS * TOKENS


def routed(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOPK, dim=1).indices
    return x, ids, torch.rand(TOKENS, TOPK, generator=random)


def weighted(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What comes back if each expert doubles its rows: the sum in the order of choices, in fp32."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for k in range(weights.shape[1]):
        total += weights[:, k : k + 1] * (2 * x).float()
    return total.bfloat16()


class Experts(threading.Thread):
    """Doubles the rows of one block after the other, the last one first, and adds to its counter in two steps."""

    def __init__(
        self, rows: torch.Tensor, answers: torch.Tensor, counters: torch.Tensor, block: int, value: int
    ) -> None:
        super().__init__()
        self.rows, self.answers, self.counters, self.block, self.value = rows, answers, counters, block, value

    def run(self) -> None:
        blocks = -(-SLOTS // self.block)
        for i in reversed(range(LOCAL * blocks)):
            expert, first = i // blocks, i % blocks * self.block
            time.sleep(0.002)
            part = slice(first, first + self.block)
            self.counters[i] += self.value - 1
            self.answers[expert, part] = 2 * self.rows[expert, part]
            self.counters[i] += 1


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("block", [5, SLOTS])
def test_combines_as_sglang_calls_them(block: int, hooked: bool) -> None:
    """block SLOTS: a counter per expert, as on Blackwell."""

    def program(comm: ep.Communicator) -> None:
        x, ids, weights = routed(comm.rank)
        buffer = deep_ep.Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
        for value in (3, 1):
            rows, counts, handle, _, hook = buffer.low_latency_dispatch(
                x, ids, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=hooked
            )
            if hook is not None:
                hook()
            answers = torch.full_like(rows, float("nan"))
            counters = torch.zeros(LOCAL * -(-SLOTS // block) + 3, dtype=torch.int32)
            of_blocks = {"packed_recv_count": counts, "comp_signal": counters, "block_m": block, "threshold": value}
            of_experts = {"src_signals": counters.view(torch.uint32), "src_signal_expect_value": value}
            signals: dict[str, Any] = of_experts if block == SLOTS else {**of_blocks, "num_sms": 3}
            experts = Experts(rows, answers, counters, block, value)
            experts.start()
            sums, _, hook = buffer.low_latency_combine(
                answers, ids, weights, handle, return_recv_hook=hooked, overlap=True, **signals
            )
            if hook is not None:
                hook()
            experts.join()
            assert torch.equal(sums, weighted(x, weights))
            again = buffer.low_latency_combine(answers, ids, weights, handle)[0]  # waits for nothing
            assert torch.equal(again, sums)
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_wrong_signals_are_named() -> None:
    def program(comm: ep.Communicator) -> None:
        x, ids, weights = routed(comm.rank)
        buffer = deep_ep.Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
        counters = torch.ones(LOCAL, dtype=torch.int32)
        right: dict[str, Any] = {"comp_signal": counters, "block_m": SLOTS, "threshold": 1}
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"comp_signal": None}, "overlap is True with 0 of comp_signal and src_signals"),
            ({"src_signals": counters}, "overlap is True with 2 of comp_signal and src_signals"),
            ({"block_m": 0}, "block_m is 0, allowed: 1 and more"),
            ({"block_m": None}, "block_m is None, allowed: whole numbers, 1 and more"),
            ({"threshold": 0}, "threshold is 0, allowed: 1 and more"),
            ({"threshold": 1 << 40}, "threshold is 1099511627776, allowed: at most 2147483647"),
            ({"num_sms": 1 << 40}, "num_sms is 1099511627776, allowed: at most 2147483647"),
            ({"num_sms": -1}, "num_sms is -1, allowed: 0 and more"),
            ({"block_m": SLOTS - 1}, f"comp_signal is .*, expected .* at least {2 * LOCAL} elements"),
            ({"comp_signal": counters.float()}, "comp_signal is .*, expected .*int32"),
        ]
        for wrong, message in wrongs:
            with pytest.raises(AssertionError, match=message):
                buffer.low_latency_combine(rows, ids, weights, handle, overlap=True, **{**right, **wrong})
        assert buffer.low_latency_combine(rows, ids, weights, handle, overlap=True, **right)[0].isfinite().all()
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_a_handle_publishes_and_waits() -> None:
    """The words of one turn, read and written as a kernel would."""

    def program(comm: ep.Communicator) -> None:
        x, ids, weights = routed(comm.rank)
        group = ep.Group(comm, num_experts=EXPERTS, max_dispatch_tokens_per_rank=TOKENS, max_token_bytes=2 * HIDDEN)
        handle = group.init_handle(ep.Layout.EXPERT_MAJOR, TOPK)
        handle.update(ids)
        block, blocks = 4, SLOTS // 4
        words = torch.zeros(handle.overlap_words(block), dtype=torch.int32)
        handle.set_overlap(words, block_rows=block, done_value=1)
        half = LOCAL * (1 + 3 * blocks)
        assert len(words) == 32 + 2 * half
        rows, sums = torch.zeros(LOCAL, SLOTS, HIDDEN, dtype=torch.bfloat16), torch.zeros_like(x)
        counts = torch.zeros(LOCAL, dtype=torch.int32)
        for turn in range(3):
            handle.dispatch(x, rows, layout_info=ep.LayoutInfo(expert_counters=counts))
            assert words[0] == turn + 1
            of_turn = words[32 + turn % 2 * half :][:half]
            assert torch.equal(of_turn[:LOCAL], counts + 1)
            ready = of_turn[LOCAL:][: LOCAL * blocks].view(LOCAL, blocks)
            expected = (counts[:, None] - block * torch.arange(blocks)).clamp(0, block)
            assert torch.equal(ready, expected.int())
            of_turn[LOCAL + LOCAL * blocks :][: LOCAL * blocks] = 1
            handle.combine(2 * rows, ep.CombineOutputs(tokens=sums, topk_weights=weights))
            assert torch.equal(sums, weighted(x, weights))
        handle.set_overlap()
        with pytest.raises(ep.InvalidArgument, match="overlap.memory has 3 elements, expected at least"):
            handle.set_overlap(words[:3], block_rows=block)
        handle.close()
        group.close()

    ep.run_threads(RANKS, program)


def test_a_high_throughput_handle_publishes() -> None:
    def program(comm: ep.Communicator) -> None:
        x, ids, weights = routed(comm.rank)
        most = TOPK * SLOTS
        group = ep.Group(
            comm,
            num_experts=EXPERTS,
            max_dispatch_tokens_per_rank=TOKENS,
            max_token_bytes=2 * HIDDEN,
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            max_recv_tokens_per_rank=most,
        )
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, ids)
        block, blocks = 4, SLOTS // 4
        words = torch.zeros(handle.overlap_words(block), dtype=torch.int32)
        handle.set_overlap(words, block_rows=block)
        half = LOCAL * (1 + 3 * blocks)
        assert len(words) == 32 + 2 * half
        rows, row_weights = torch.zeros(most, HIDDEN, dtype=torch.bfloat16), torch.zeros(most)
        counts = torch.zeros(LOCAL, dtype=torch.int32)
        for turn in range(3):
            handle.dispatch(
                ep.DispatchInputs(tokens=x, topk_weights=weights),
                ep.DispatchOutputs(tokens=rows, topk_weights=row_weights),
                layout_info=ep.LayoutInfo(expert_counters=counts),
            )
            assert words[0] == turn + 1
            of_turn = words[32 + turn % 2 * half :][:half]
            assert torch.equal(of_turn[:LOCAL], counts + 1)
            ready = of_turn[LOCAL:][: LOCAL * blocks].view(LOCAL, blocks)
            assert torch.equal(ready, (counts[:, None] - block * torch.arange(blocks)).clamp(0, block).int())
        with pytest.raises(ep.InvalidUsage, match="overlap.done_value is 1, allowed for HT handles: None, 0"):
            handle.set_overlap(words, block_rows=block, done_value=1)
        wrong: list[tuple[str, Any]] = [
            ("block_rows is -1", lambda: handle.overlap_words(-1)),
            ("block_rows is 4294967296", lambda: handle.overlap_words(1 << 32)),
            ("block_rows is x", lambda: handle.set_overlap(words, block_rows="x")),  # type: ignore[arg-type]
            ("done_value is -1", lambda: handle.set_overlap(words, done_value=-1)),
            ("num_sms is -1", lambda: handle.set_sms(-1)),
            ("alignment is -1", lambda: handle.set_alignment(-1)),
        ]
        for message, call in wrong:
            with pytest.raises(ep.InvalidArgument, match=f"{message}, allowed: 0..4294967295"):
                call()
        handle.close()
        group.close()

    ep.run_threads(RANKS, program)
