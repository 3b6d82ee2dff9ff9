# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's TokenSwitch over crossdock.torch.token_switch, against plain loops; ranks are processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")
dist: Any = pytest.importorskip("torch.distributed", reason="torch has no distributed package: skipped")
interface: Any = pytest.importorskip("torch.distributed._token_switch", reason="torch is older than 2.15: skipped")

import crossdock as ep  # noqa: E402
import crossdock.torch.token_switch as token_switch  # noqa: E402

RANKS, LOCAL, TOPK, HIDDEN, MOST = 3, 2, 3, 32, 8
EXPERTS, ROWS = RANKS * LOCAL, RANKS * MOST * LOCAL
LAYOUTS = ("flat", "expert_major")
UNEVEN = (5, 0, MOST)  # tokens of each rank


def problem(source: int, dtype: Any) -> tuple[Any, Any, Any]:
    """Tokens, choices and weights of a rank, the same on all of them; some choices are none."""
    random = torch.Generator().manual_seed(source)
    num_tokens = UNEVEN[source]
    tokens = torch.randn(num_tokens, HIDDEN, generator=random).to(dtype)
    ids = torch.rand(num_tokens, EXPERTS, generator=random).argsort(dim=1)[:, :TOPK].contiguous()
    ids[::3, 1] = -1
    return tokens, ids, torch.rand(num_tokens, TOPK, generator=random)


def received_by(rank: int, layout: str, dtype: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Rows of a rank with their weights and local experts, by plain loops."""
    rows: list[Any] = []
    weights: list[Any] = []
    experts: list[Any] = []
    places = range(LOCAL) if layout == "expert_major" else (None,)
    for expert in places:
        for source in range(RANKS):
            for token, ids, token_weights in zip(*problem(source, dtype), strict=True):
                local = [int(one) - rank * LOCAL for one in ids]
                if expert is not None:
                    rows += [token] * local.count(expert)
                    weights += [float(w) for one, w in zip(local, token_weights, strict=True) if one == expert]
                    continue
                pairs = zip(local, token_weights, strict=True)
                # Packed by local expert, in front of what stays unused.
                if found := sorted((one, float(w)) for one, w in pairs if 0 <= one < LOCAL):
                    rows.append(token)
                    experts.append([e for e, _ in found] + [-1] * (TOPK - len(found)))
                    weights.append([w for _, w in found] + [0.0] * (TOPK - len(found)))
    return rows, weights, experts


def layer(switch: Any, rank: int, layout: str, tokens: Any, ids: Any, weights: Any) -> Any:
    """Experts are tanh times a factor that is the expert's number plus one."""
    counts = ids.new_zeros(LOCAL + 1, dtype=torch.int32)
    routing = switch.create_routing(ids, counts, layout=layout)
    rows, row_weights, experts = switch.dispatch(routing, tokens, weights, ROWS)
    first = rank * LOCAL
    if layout == "flat":
        factors = (row_weights * torch.where(experts >= 0, experts + first + 1.0, 0.0)).sum(dim=1)
    else:
        assert experts is None
        numbers = torch.arange(LOCAL).repeat_interleave(counts[:LOCAL]) + first + 1.0
        factors = row_weights * torch.nn.functional.pad(numbers, (0, len(rows) - len(numbers)))
    made = torch.tanh(rows) * factors.unsqueeze(1).to(rows.dtype)
    # Callers may cut off what no token has filled.
    return switch.combine(routing, made[: routing.handle.get_num_recv_tokens()])


def plain_layer(tokens: Any, ids: Any, weights: Any) -> Any:
    factors = torch.where(ids >= 0, ids + 1.0, 0.0)
    return torch.tanh(tokens) * (weights * factors).sum(dim=1, keepdim=True).to(tokens.dtype)


def on_ranks(path: Path, check: Callable[..., None], *arguments: Any) -> None:
    ep.run_processes(RANKS, run_one, str(path / "store"), check, *arguments)


def run_one(comm: ep.Communicator, store: str, check: Callable[..., None], *arguments: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.num_ranks)
    switch = interface.TokenSwitchNCCL(dist.group.WORLD, EXPERTS, MOST, ROWS, HIDDEN * 4)
    check(comm.rank, switch, *arguments)
    token_switch.close(switch)
    token_switch.close(switch)
    dist.destroy_process_group()


def rows_are_those_of_loops(rank: int, switch: Any) -> None:
    for layout in LAYOUTS:
        tokens, ids, weights = problem(rank, torch.float32)
        counts = torch.full((LOCAL + 2,), 77, dtype=torch.int32)
        routing = switch.create_routing(ids, counts, layout=layout)
        ids.fill_(0)  # the routing has its own
        rows, row_weights, experts = received_by(rank, layout, torch.float32)
        everybody = torch.cat([problem(source, torch.float32)[1] for source in range(RANKS)])
        expected = [int((everybody == rank * LOCAL + expert).sum()) for expert in range(LOCAL)]
        assert counts.tolist() == [*expected, 77, 77]
        assert routing.handle.get_num_recv_tokens() == len(rows)
        kind = (ROWS, TOPK) if layout == "flat" else (ROWS,)
        out = (
            torch.zeros(ROWS, HIDDEN),
            torch.zeros(kind),
            torch.zeros(kind, dtype=torch.int64) if layout == "flat" else None,
        )
        assert switch.dispatch(routing, tokens, weights, out=out) is out
        torch.testing.assert_close(out[0][: len(rows)], torch.stack(rows), rtol=0, atol=0)
        torch.testing.assert_close(out[1][: len(rows)], torch.tensor(row_weights), rtol=0, atol=0)
        assert out[2] is None or out[2][: len(rows)].tolist() == experts
        sums = torch.zeros(tokens.shape)
        assert switch.combine(routing, out[0], out=sums) is sums


def gradients_are_those_of_loops(rank: int, switch: Any) -> None:
    """Several routings are open at once, and go backward in another order."""
    for dtype, bound in (torch.float32, 1e-5), (torch.bfloat16, 4e-2):
        open_layers = []
        for layout in (*LAYOUTS, *LAYOUTS):
            tokens, ids, weights = problem(rank, dtype)
            tokens.requires_grad_()
            result = layer(switch, rank, layout, tokens, ids, weights)
            open_layers.append((tokens, result, plain_layer(tokens, ids, weights)))
        for tokens, result, expected in open_layers[2:] + open_layers[:2]:
            torch.testing.assert_close(result, expected, rtol=bound, atol=bound)
            direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
            [found] = torch.autograd.grad(result, tokens, direction)
            [gradient] = torch.autograd.grad(expected, tokens, direction)
            torch.testing.assert_close(found, gradient, rtol=bound, atol=bound * 4)


def wrong_arguments_are_named(rank: int, switch: Any) -> None:
    """On all ranks alike; what comes after works."""
    tokens, ids, weights = problem(rank, torch.float32)
    for counts in torch.zeros(LOCAL - 1, dtype=torch.int32), torch.zeros(LOCAL), torch.zeros(1, 2, dtype=torch.int32):
        with pytest.raises(ep.InvalidArgument, match="per_expert_token_counts is .* at least 2 elements"):
            switch.create_routing(ids, counts, layout="flat")
    with pytest.raises(ep.InvalidArgument, match=r"topk_idx has shape \[4\], expected \[B, K\]"):
        switch.create_routing(torch.zeros(4, dtype=torch.int64), layout="flat")
    with pytest.raises(ep.InvalidArgument, match=f"{MOST + 1}"):
        switch.create_routing(torch.zeros(MOST + 1, TOPK, dtype=torch.int64), layout="flat")
    with pytest.raises(ValueError, match="layout must be one of"):
        switch.create_routing(ids, layout="rank_major")
    routing = switch.create_routing(ids, layout="flat")
    with pytest.raises(ValueError, match="max_recv_tokens is required"):
        switch.dispatch(routing, tokens, weights)
    with pytest.raises(ep.InvalidArgument, match=f"tokens has {ROWS - 1} rows, expected at least .* \\({ROWS}\\)"):
        switch.dispatch(routing, tokens, weights, ROWS - 1)
    with pytest.raises(ep.InvalidArgument, match="topk_weights"):
        switch.dispatch(routing, tokens, weights[:, :1], ROWS)
    with pytest.raises(ep.InvalidArgument, match="expected a TokenSwitchNCCL"):
        token_switch.close(routing)
    torch.testing.assert_close(
        layer(switch, rank, "flat", tokens, ids, weights), plain_layer(tokens, ids, weights), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("check", [rows_are_those_of_loops, gradients_are_those_of_loops, wrong_arguments_are_named])
def test_on_ranks(check: Callable[..., None], tmp_path: Path) -> None:
    on_ranks(tmp_path, check)


def test_it_is_registered_by_its_import() -> None:
    """Without it, torch's wheel says that it has no implementation; what another package registered is not replaced."""
    make = "from torch.distributed._token_switch import _import_nccl_ep as find; print(find().__name__)"
    own = "import crossdock.torch.token_switch"
    for code, found in [
        (f"{own}; {make}", "crossdock.torch.token_switch"),
        (make, "ImportError"),
        (f"import sys, types; sys.modules['torch._nccl_ep'] = types.ModuleType('x'); {own}", "is imported already"),
    ]:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
        assert found in done.stdout + done.stderr.splitlines()[-1] if done.stderr else done.stdout, done


# ---- invariant groups: a layer's bits at every number of ranks


def bits_of_layer(rank: int, ranks: int) -> list[Any]:
    """Sums, and gradients of tokens and of experts, of a layer with the same tokens and experts at any size. What an
    expert makes of a row does not depend on its other rows."""
    num_tokens, experts, most = 24, 8, 24 * 5
    random = torch.Generator().manual_seed(7)
    tokens = torch.randn(num_tokens, HIDDEN, generator=random).bfloat16()
    ids = torch.rand(num_tokens, experts, generator=random).argsort(dim=1)[:, :5].contiguous()
    ids[::5, 2] = -1
    weights = torch.rand(ids.shape, generator=random)
    direction = torch.randn(tokens.shape, generator=random).bfloat16()
    factors = torch.randn(experts, HIDDEN, generator=random) * 2.0 ** torch.arange(-4, 4).unsqueeze(1)

    own, local = slice(num_tokens * rank // ranks, num_tokens * (rank + 1) // ranks), experts // ranks
    own_tokens = tokens[own].clone().requires_grad_()
    own_factors = factors[rank * local : (rank + 1) * local].clone().requires_grad_()
    switch = interface.TokenSwitchNCCL(dist.group.WORLD, experts, num_tokens // ranks, most, HIDDEN * 2)
    counts = torch.zeros(local, dtype=torch.int32)
    routing = switch.create_routing(ids[own], counts, layout="expert_major")
    rows, row_weights, _ = switch.dispatch(routing, own_tokens, weights[own], most)
    parts = [*counts.tolist(), most - int(counts.sum())]
    zones = zip(own_factors, rows.split(parts), row_weights.unsqueeze(1).split(parts), strict=False)
    made = torch.cat([(torch.tanh(zone.float() * factor) * its).bfloat16() for factor, zone, its in zones])
    sums = switch.combine(routing, made)
    gradients = torch.autograd.grad(sums, (own_tokens, own_factors), direction[own])
    token_switch.close(switch)
    return [one.detach().float().numpy() for one in (sums, *gradients)]


def bits_of_layers(comm: ep.Communicator, store: str) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.num_ranks)
    found = {}
    for invariant in "1", "0":
        os.environ["NCCL_EP_INVARIANT"] = invariant
        found[invariant] = bits_of_layer(comm.rank, comm.num_ranks)
    dist.destroy_process_group()
    return found


def test_an_invariant_layer_has_the_same_bits_at_every_size(tmp_path: Path) -> None:
    found = {}
    for ranks in 1, 2, 4:
        results = ep.run_processes(ranks, bits_of_layers, str(tmp_path / f"store{ranks}"))
        for invariant in "1", "0":
            parts = zip(*(one[invariant] for one in results), strict=True)
            found[ranks, invariant] = [np.concatenate(part) for part in parts]
    for ranks in 2, 4:
        same = [
            [np.array_equal(*pair) for pair in zip(found[ranks, invariant], found[1, invariant], strict=True)]
            for invariant in ("1", "0")
        ]
        # Gradients of experts add up the same rows in the same order in any case.
        assert same == [[True, True, True], [False, False, True]]
