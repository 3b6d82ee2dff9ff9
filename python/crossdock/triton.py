# SPDX-License-Identifier: Apache-2.0
"""For Triton kernels of experts that run beside a dispatch and a low-latency combine (Handle.set_overlap).

A kernel that computes rows while others still arrive, and whose rows a combine sends while it computes others:

    @triton.jit
    def experts(words, ..., ZONES: tl.constexpr, BLOCKS: tl.constexpr):
        turn = overlap_turn(words)
        rows = wait_count(words, turn, zone, ZONES, BLOCKS)
        ...
        rows = wait_block(words, turn, zone, block, ZONES, BLOCKS)
        ...  # load and compute the block's rows, store the results
        finish_block(words, turn, zone, block, ZONES, BLOCKS)
        ...
        leave(words, tl.num_programs(0))

- words: the memory of set_overlap.
- ZONES: the local experts (rank-major: ranks). BLOCKS: of a zone, R*M (rank-major: M) / block_rows rounded up. High
  throughput: R*M, or the group's max_recv_tokens_per_rank if that is less, instead of R*M.
- High throughput: zones follow one another, so a zone's first row is the sum of wait_counts of those before it, each
  rounded up to the handle's alignment. Combines do not wait for counters: do not call finish_block.
- Kernels of one turn, one after the other on a stream, may share the waiting and the finishing; the last one leaves.
- Waits end after MOST_POLLS looks, which take some seconds: then leave the block alone. The combine that waits for it
  says which one it was. (Not after a time: threads of a program could read different clocks, and part.)
- crossdock/overlap.hpp has the same for CUDA and C++, and says where each word is.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_POLLS = tl.constexpr(1 << 22)

# OverlapLayout
_HEAD = tl.constexpr(32)
_CONSUMERS = tl.constexpr(1)
_LEAVING = tl.constexpr(2)


@triton.jit
def _half(turn: tl.tensor, ZONES: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    return _HEAD + turn % 2 * (ZONES * (1 + 3 * BLOCKS))


@triton.jit
def count_word(
    words: tl.tensor, turn: tl.tensor, zone: tl.tensor, ZONES: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """The address of 1 + a zone's rows; 0 while they are not known. zone may be a tensor."""
    return words + _half(turn, ZONES, BLOCKS) + zone


@triton.jit
def ready_word(
    words: tl.tensor, turn: tl.tensor, zone: tl.tensor, block: tl.tensor, ZONES: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """The address of a block's rows, once all are in place; 0 until then."""
    return words + _half(turn, ZONES, BLOCKS) + ZONES + zone * BLOCKS + block


@triton.jit
def overlap_turn(words: tl.tensor) -> tl.tensor:
    """Of this run: the same for all programs, until the last one leaves. Waits until the dispatch before has ended."""
    turn = tl.load(words + _CONSUMERS, volatile=True)
    polls = 0
    while (tl.atomic_add(words, 0, sem="acquire", scope="gpu") < turn) & (polls < MOST_POLLS):
        polls += 1
    return turn


@triton.jit
def is_dispatch_over(words: tl.tensor, turn: tl.tensor) -> tl.tensor:
    """Whether the dispatch of this turn has ended: then all blocks are in place, and need no wait_block."""
    return tl.atomic_add(words, 0, sem="acquire", scope="gpu") > turn


@triton.jit
def _wait(word: tl.tensor) -> tl.tensor:
    value = tl.atomic_add(word, 0, sem="acquire", scope="gpu")
    polls = 0
    while (value == 0) & (polls < MOST_POLLS):
        value = tl.atomic_add(word, 0, sem="acquire", scope="gpu")
        polls += 1
    return value


@triton.jit
def wait_count(
    words: tl.tensor, turn: tl.tensor, zone: tl.tensor, ZONES: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """The rows of a zone, once they are known; -1 if they do not come."""
    return _wait(count_word(words, turn, zone, ZONES, BLOCKS)) - 1


@triton.jit
def wait_counts(
    words: tl.tensor, turn: tl.tensor, zones: tl.tensor, ZONES: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """The same of a tensor of zones at once."""
    word = count_word(words, turn, zones, ZONES, BLOCKS)
    rows = tl.load(word, volatile=True)
    polls = 0
    while (polls < MOST_POLLS) & (tl.min(rows) == 0):
        rows = tl.load(word, volatile=True)
        polls += 1
    # Warps may hold copies of the same element, and have loaded them at different times.
    tl.debug_barrier()
    return tl.load(word, volatile=True) - 1


@triton.jit
def wait_block(
    words: tl.tensor, turn: tl.tensor, zone: tl.tensor, block: tl.tensor, ZONES: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """The rows of a block that the zone has, once all are in place; 0 if they do not come."""
    return _wait(ready_word(words, turn, zone, block, ZONES, BLOCKS))


@triton.jit
def finish_block(
    words: tl.tensor, turn: tl.tensor, zone: tl.tensor, block: tl.tensor, ZONES: tl.constexpr, BLOCKS: tl.constexpr
) -> None:
    """Adds 1 to a block's counter, after everything that this program has stored."""
    tl.debug_barrier()
    done = ready_word(words, turn, zone, block, ZONES, BLOCKS) + ZONES * BLOCKS
    tl.atomic_add(done, 1, sem="release", scope="gpu")


@triton.jit
def leave(words: tl.tensor, num_programs: tl.tensor) -> None:
    """This program uses no more words of the turn. The last of num_programs ends it."""
    tl.debug_barrier()
    if tl.atomic_add(words + _LEAVING, 1, sem="acq_rel", scope="gpu") + 1 == num_programs:
        tl.atomic_xchg(words + _LEAVING, 0, sem="relaxed", scope="gpu")
        tl.atomic_add(words + _CONSUMERS, 1, sem="acq_rel", scope="gpu")
