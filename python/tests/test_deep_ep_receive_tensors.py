# SPDX-License-Identifier: Apache-2.0
"""The tensors of low-latency dispatches and combine buffers: two memories that serve in turn, but only where nobody
holds what lies in them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import crossdock as ep  # noqa: E402
from crossdock import deep_ep  # noqa: E402
from crossdock.deep_ep.low_latency import MOST_PAIRS  # noqa: E402
from crossdock.deep_ep.utils.math import per_token_cast_back  # noqa: E402

LOCAL, TOPK, HIDDEN, TOKENS = 2, 2, 512, 5
FORMS: dict[str, dict[str, bool]] = {
    "bf16": {"use_fp8": False},
    "fp8": {"use_fp8": True},
    "ue8m0": {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
}


class Rank:
    """A rank's buffer, and tokens that differ from step to step. Made with a communicator of one rank by default."""

    def __init__(self, comm: Any = None) -> None:
        [own] = [comm] if comm is not None else ep.Communicator.create_threads(1)
        self.rank, self.num_experts = own.rank, LOCAL * own.num_ranks
        self.buffer: Any = deep_ep.Buffer(own, low_latency_mode=True, explicitly_destroy=True)
        self.weights = torch.full((TOKENS, TOPK), 0.5)

    def tokens(self, step: int) -> Any:
        return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 * step + self.rank)).bfloat16()

    def ids(self, step: int) -> Any:
        return (torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) + step) % self.num_experts

    def dispatch(self, step: int, form: str = "bf16", **settings: Any) -> Any:
        settings = FORMS[form] | settings
        return self.buffer.low_latency_dispatch(self.tokens(step), self.ids(step), TOKENS, self.num_experts, **settings)

    def combined(self, step: int, rows: Any, handle: Any, **settings: Any) -> Any:
        return self.buffer.low_latency_combine(rows, self.ids(step), self.weights, handle, **settings)


@pytest.fixture
def one() -> Any:
    rank = Rank()
    yield rank
    if rank.buffer.runtime is not None:
        rank.buffer.destroy()


def values_of(rows: Any) -> Any:
    return rows[0] if isinstance(rows, tuple) else rows


def memory_of(tensor: Any) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def places_of(rows: Any) -> list[int]:
    return [part.data_ptr() for part in (rows if isinstance(rows, tuple) else (rows,))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("settings", [{}, {"return_recv_hook": True}, {"async_finish": True}])
def test_the_memory_of_a_dispatch_serves_the_second_next(one: Rank, form: str, settings: dict[str, bool]) -> None:
    places = []
    for step in range(6):
        rows, _, _, _, hook = one.dispatch(step, form, **settings)
        if hook is not None:
            hook()
        # The packed exponents of ue8m0 are tensors of their own.
        places.append(places_of(rows)[: 1 if form == "ue8m0" else 2])
    for earlier, between, later in zip(places, places[1:], places[2:], strict=False):
        assert later == earlier and all(one != other for one, other in zip(earlier, between, strict=True))


def test_memory_is_kept_between_dispatches(one: Rank) -> None:
    kept = [memory_of(one.dispatch(step)[0]) for step in range(2)]
    assert not any(memory.expired() for memory in kept)
    assert memory_of(one.dispatch(2)[0]).cdata == kept[0].cdata


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_what_is_held_is_not_overwritten(one: Rank, form: str) -> None:
    """As a tensor, a view of it, or an array of another library."""
    holds = {
        "tensor": lambda rows: rows,
        "view": lambda rows: rows[1, 1:, ::2],
        "detached": lambda rows: rows.view(torch.uint8).detach(),
        "numpy": lambda rows: torch.from_numpy(rows.view(torch.uint8).numpy()),
        "dlpack": lambda rows: torch.from_dlpack(rows.view(torch.uint8)),
    }
    for name, hold in holds.items():
        rows = values_of(one.dispatch(0, form)[0])
        rows.view(torch.uint8).fill_(1)  # all of them are defined then
        held = hold(rows)
        before = held.clone()
        for step in range(1, 5):
            rows = values_of(one.dispatch(step, form)[0])
            rows.view(torch.uint8).fill_(2)
        assert torch.equal(held.float(), before.float()), name
    kept = [values_of(one.dispatch(step, form)[0]) for step in range(5)]
    assert len({rows.data_ptr() for rows in kept}) == 5


def test_pending_operations_stay_right() -> None:
    """Two dispatches wait for their hooks, then two combines, for several rounds; their rows are dropped in between."""

    def program(comm: ep.Communicator) -> None:
        rank = Rank(comm)
        for form in ("bf16", "fp8"):
            for first in range(0, 8, 2):
                steps = first, first + 1
                sent = [rank.dispatch(step, form, return_recv_hook=True) for step in steps]
                for *_, hook in sent:
                    hook()
                combined = []
                for step, (rows, _, handle, _, _) in zip(steps, sent, strict=True):
                    if isinstance(rows, tuple):
                        flat = rows[0].view(-1, HIDDEN), rows[1].reshape(rows[0].shape[0] * rows[0].shape[1], -1)
                        rows = per_token_cast_back(*flat).view(rows[0].shape)
                    combined.append(rank.combined(step, rows, handle, return_recv_hook=True))
                for _, _, hook in combined:
                    hook()
                for step, (result, _, _) in zip(steps, combined, strict=True):
                    torch.testing.assert_close(result, rank.tokens(step), rtol=0.08, atol=0.01)
        rank.buffer.destroy()

    ep.run_threads(2, program)


def test_rows_dropped_before_the_hook_are_not_given_away(one: Rank) -> None:
    hook = one.dispatch(0, return_recv_hook=True)[4]
    kept = one.dispatch(1)[0]
    before, third = kept.clone(), one.dispatch(2)[0]
    assert third.data_ptr() != kept.data_ptr()
    again = third.clone()
    hook()
    assert torch.equal(kept, before) and torch.equal(third, again)


def test_forms_share_memory_by_the_shape_of_their_rows(one: Rank) -> None:
    """Fewer tokens in x, or int32 ids, are of the same kind; another type, hidden size or M is not."""
    first = one.dispatch(0)[0].data_ptr()
    one.dispatch(1, "fp8")
    fewer = one.buffer.low_latency_dispatch(
        one.tokens(1)[:2], one.ids(1)[:2].int(), TOKENS, one.num_experts, use_fp8=False
    )[0]
    wider = one.buffer.low_latency_dispatch(
        torch.ones(2, 2 * HIDDEN).bfloat16(), one.ids(1)[:2], TOKENS, one.num_experts, use_fp8=False
    )[0]
    assert fewer.data_ptr() != first and wider.shape == (LOCAL, TOKENS, 2 * HIDDEN)
    assert one.dispatch(2)[0].data_ptr() == first


def test_combine_buffers_serve_in_turn(one: Rank) -> None:
    places = []
    for step in range(5):
        rows, _, handle, _, _ = one.dispatch(step)
        given = one.buffer.get_next_low_latency_combine_buffer(handle)
        given.copy_(rows)
        places.append(given.data_ptr())
        result = one.combined(step, given, handle, zero_copy=True)[0]
        torch.testing.assert_close(result, one.tokens(step), rtol=0.02, atol=0.01)
        assert given.data_ptr() != rows.data_ptr()
    assert len(set(places)) == 2 and places[::2] == places[:1] * 3


def test_the_buffer_of_a_handle_is_its_own_while_it_lives(one: Rank) -> None:
    handles = [one.dispatch(step)[2] for step in range(3)]
    places = {one.buffer.get_next_low_latency_combine_buffer(handle).data_ptr() for handle in handles}
    assert len(places) == 3


def test_destroy_frees_the_memory(one: Rank) -> None:
    """Though a handle is left; rows that are held stay."""
    rows, _, handle, _, _ = one.dispatch(0)
    gone = [memory_of(rows), memory_of(one.buffer.get_next_low_latency_combine_buffer(handle))]
    handle.lease.combine_buffer = None
    del rows
    held = one.dispatch(1)[0]
    held.fill_(3)
    assert not any(memory.expired() for memory in gone)
    one.buffer.destroy()
    assert all(memory.expired() for memory in gone) and len(handle) == 5
    assert torch.equal(held, torch.full_like(held, 3))


def test_few_kinds_are_kept(one: Rank) -> None:
    """Memory does not grow with the number of shapes that were ever dispatched; a forgotten one is as good as new."""

    def dispatch(hidden: int) -> Any:
        x = torch.ones(TOKENS, hidden).bfloat16()
        return one.buffer.low_latency_dispatch(x, one.ids(0), TOKENS, one.num_experts, use_fp8=False)[0]

    sizes = [128 * number for number in range(MOST_PAIRS + 2, 0, -1)]
    kept = [memory_of(dispatch(hidden)) for hidden in sizes]
    assert [memory.expired() for memory in kept] == [True, True, *[False] * MOST_PAIRS]
    first = dispatch(sizes[0])
    assert first.shape[2] == sizes[0] and torch.equal(first[0, 0], torch.ones(sizes[0]).bfloat16())
    gone = memory_of(first)
    del first
    one.buffer.destroy()
    assert gone.expired() and all(memory.expired() for memory in kept)


def test_modes_of_autograd_do_not_stay_in_the_memory(one: Rank) -> None:
    """Memory that was made in inference mode serves outside, where its tensor can be saved for backward and changed."""
    with torch.inference_mode():
        places = [one.dispatch(step)[0].data_ptr() for step in range(2)]
    for step in range(2):
        rows = one.dispatch(step)[0]
        assert rows.data_ptr() == places[step] and not rows.is_inference() and not rows.requires_grad
        factor = torch.ones(HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        (rows * factor).float().nan_to_num().sum().backward()
        assert factor.grad is not None
        rows.zero_()
        del rows
    with torch.inference_mode():
        rows = one.dispatch(0)[0]
        rows.zero_()


def test_without_torch_counting_users_every_tensor_is_new() -> None:
    """Not every version of torch can tell."""
    code = (
        "import torch; del torch._C._storage_Use_Count\n"
        "import crossdock as ep\nfrom crossdock.deep_ep import Buffer\n"
        "[comm] = ep.Communicator.create_threads(1)\n"
        "buffer = Buffer(comm, low_latency_mode=True, explicitly_destroy=True)\n"
        "x, ids = torch.ones(1, 128).bfloat16(), torch.tensor([[0]])\n"
        "kept = [buffer.low_latency_dispatch(x, ids, 1, 1, use_fp8=False)[0] for _ in range(4)]\n"
        "assert len({rows.data_ptr() for rows in kept}) == 4\n"
        "buffer.destroy()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
