# SPDX-License-Identifier: Apache-2.0
"""crossdock.torch: tensors, operators with gradients, compilation, the module; needs torch."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import crossdock as ep  # noqa: E402
import crossdock.torch as ept  # noqa: E402
from crossdock.torch.quantise import nvfp4_scales  # noqa: E402

MODES = list(ep.Algorithm)
HIDDEN, TOPK, TOKENS = 8, 2, 4


def exchange_of(comm: ep.Communicator, mode: ep.Algorithm, **fields: Any) -> ept.Exchange:
    settings: dict[str, Any] = {
        "num_experts": 2 * comm.num_ranks,
        "num_topk": TOPK,
        "max_tokens": 6,
        "hidden": HIDDEN,
    } | fields
    return ept.Exchange(comm, algorithm=mode, **settings)


def problem(rank: int, num_experts: int, dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    random = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS, HIDDEN, generator=random).to(dtype)
    weights = torch.rand(TOKENS, TOPK, generator=random)
    indices = torch.stack([torch.randperm(num_experts, generator=random)[:TOPK] for _ in range(TOKENS)])
    indices[1, 0] = -1
    return tokens.requires_grad_(), indices, weights.requires_grad_()


def layer(exchange: ept.Exchange, tokens: Any, indices: Any, weights: Any) -> Any:
    """Experts are tanh times a factor that is the expert's number plus one."""
    received = exchange.dispatch(tokens, indices, weights)
    first = exchange.rank * exchange.num_local_experts
    factors = torch.where(received.experts >= 0, received.experts + first + 1.0, 0.0)
    coefficients = (received.weights * factors).sum(dim=1, keepdim=True)
    return exchange.combine(torch.tanh(received.rows) * coefficients.to(tokens.dtype), received)


def plain_layer(tokens: Any, indices: Any, weights: Any) -> Any:
    factors = torch.where(indices >= 0, indices + 1.0, 0.0)
    return torch.tanh(tokens) * (weights * factors).sum(dim=1, keepdim=True).to(tokens.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients(mode: ep.Algorithm, dtype: str) -> None:
    def program(comm: ep.Communicator) -> None:
        kind = getattr(torch, dtype)
        with exchange_of(comm, mode, dtype=kind) as exchange:
            for _ in range(10):  # more than max_in_flight: handles are used again
                tokens, indices, weights = problem(comm.rank, 2 * comm.num_ranks, kind)
                result, expected = layer(exchange, tokens, indices, weights), plain_layer(tokens, indices, weights)
                bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 4e-2, "atol": 4e-2}
                torch.testing.assert_close(result, expected, **bounds)
                direction = torch.ones_like(result)
                torch.testing.assert_close(
                    torch.autograd.grad(result, (tokens, weights), direction),
                    torch.autograd.grad(expected, (tokens, weights), direction),
                    **bounds,
                )

    ep.run_threads(3, program)


@pytest.mark.parametrize("mode", MODES)
def test_nodes(mode: ep.Algorithm) -> None:
    """Between two nodes of two ranks: values and gradients are those of one."""

    def program(comm: ep.Communicator) -> None:
        with exchange_of(comm, mode, lsa_team_size=2) as exchange:
            tokens, indices, weights = problem(comm.rank, 2 * comm.num_ranks)
            result, expected = layer(exchange, tokens, indices, weights), plain_layer(tokens, indices, weights)
            torch.testing.assert_close(result, expected)
            found, wanted = (torch.autograd.grad(of.sum(), (tokens, weights)) for of in (result, expected))
            torch.testing.assert_close(found, wanted)

    ep.run_threads(4, program)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"zero_copy": True}, "zero_copy differs between ranks: False on rank 0, True on rank 1"),
        ({"num_topk": 3}, "num_topk differs between ranks: 2 on rank 0, 3 on rank 1"),
        ({"max_in_flight": 3}, "max_in_flight differs between ranks: 8 on rank 0, 3 on rank 1"),
    ],
)
def test_ranks_that_differ_are_told(fields: Any, message: str) -> None:
    def program(comm: ep.Communicator) -> None:
        own = fields if comm.rank == 1 else {}
        with pytest.raises(ep.InvalidUsage, match=message):
            exchange_of(comm, ep.Algorithm.LOW_LATENCY, **own)

    ep.run_threads(2, program)


@pytest.mark.parametrize("mode", MODES)
def test_zero_copy(mode: ep.Algorithm) -> None:
    """Peers write rows straight into the exchange's window, which is used again and again; gradients as ever."""

    def program(comm: ep.Communicator) -> None:
        with exchange_of(comm, mode, zero_copy=True, max_in_flight=2) as exchange:
            places = set()
            for _ in range(6):
                tokens, indices, weights = problem(comm.rank, 2 * comm.num_ranks)
                result, expected = layer(exchange, tokens, indices, weights), plain_layer(tokens, indices, weights)
                direction = torch.ones_like(result)
                found = torch.autograd.grad(result, (tokens, weights), direction)
                torch.testing.assert_close(result, expected)
                torch.testing.assert_close(found, torch.autograd.grad(expected, (tokens, weights), direction))
                with torch.no_grad():  # rows that the experts change where they are return from there
                    received = exchange.dispatch(tokens, indices, weights)
                    places.add(received.rows.data_ptr())
                    received.rows.mul_((received.experts >= 0).any(dim=1, keepdim=True) * 2.0)
                    ranks = torch.stack([(indices // 2 == rank).any(dim=1) for rank in range(comm.num_ranks)], dim=1)
                    expected = tokens * 2 * ranks.sum(dim=1, keepdim=True)
                    torch.testing.assert_close(exchange.combine(received.rows, received), expected)
            assert len(places) <= 2
            with pytest.raises(ep.InvalidArgument, match=r"expected with zero_copy: \[B, 8\] of torch.float32"):
                exchange.dispatch(tokens.half(), indices, weights)

    ep.run_threads(2, program)


@pytest.mark.parametrize("mode", MODES)
def test_rows_as_8_bit_floats(mode: ep.Algorithm) -> None:
    def program(comm: ep.Communicator) -> None:
        recipe = ep.DispatchQuantizationRecipe.DS_FP8E3M4
        for hidden in (128, 640):
            with exchange_of(comm, mode, dtype=torch.bfloat16, recipe=recipe, hidden=hidden) as exchange:
                _, indices, weights = problem(comm.rank, 2 * comm.num_ranks)
                tokens = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(comm.rank))
                tokens = tokens.bfloat16().requires_grad_()
                result, expected = layer(exchange, tokens, indices, weights), plain_layer(tokens, indices, weights)
                torch.testing.assert_close(result, expected, rtol=0.1, atol=0.1)
                assert not torch.equal(result, expected)
                [found], [wanted] = (torch.autograd.grad(of.sum(), [tokens]) for of in (result, expected))
                torch.testing.assert_close(found, wanted, rtol=0.2, atol=0.2)

    ep.run_threads(2, program)


def test_sums_as_4_bit_floats() -> None:
    def program(comm: ep.Communicator) -> None:
        recipe = ep.CombineQuantizationRecipe.NVFP4
        fields: dict[str, Any] = {"dtype": torch.bfloat16, "hidden": 64, "combine_recipe": recipe}
        with exchange_of(comm, ep.Algorithm.LOW_LATENCY, **fields) as exchange, torch.no_grad():
            _, indices, weights = problem(comm.rank, 2 * comm.num_ranks)
            tokens = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
            result, expected = layer(exchange, tokens, indices, weights), plain_layer(tokens, indices, weights)
            error = (result - expected).float().norm() / expected.float().norm()
            assert 0.005 < error < 0.2

    ep.run_threads(2, program)


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode: ep.Algorithm) -> None:
    """Numerically; all ranks take the same steps. Outputs are linear in what is moved, so steps may be large."""

    def program(comm: ep.Communicator) -> None:
        with exchange_of(comm, mode, max_in_flight=256) as exchange:
            tokens, indices, weights = problem(comm.rank, 2 * comm.num_ranks)

            def linear(tokens: Any, weights: Any) -> Any:
                received = exchange.dispatch(tokens, indices, weights)
                return exchange.combine(received.rows * received.weights.sum(dim=1, keepdim=True), received)

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of single precision
                assert torch.autograd.gradcheck(linear, (tokens, weights), eps=0.5, atol=1e-4, fast_mode=False)

    ep.run_threads(2, program)


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode: ep.Algorithm) -> None:
    """Schema, fake kernels, autograd registration, tracing. Tickets count up, so tokens are large and bounds loose."""
    [comm] = ep.Communicator.create_threads(1)
    with comm, exchange_of(comm, mode, num_experts=3, max_in_flight=64) as exchange:
        tokens, indices, weights = problem(0, 3)
        key = exchange.key, exchange.num_rows
        large = ((tokens * 1e6).detach().requires_grad_(), indices, (weights * 1e6).detach().requires_grad_(), *key)
        torch.library.opcheck(torch.ops.crossdock.dispatch.default, large, atol=1e3, rtol=1e-3)
        received = exchange.dispatch(tokens, indices, weights)
        rows, found = received.rows.detach().requires_grad_(), received.weights.detach()
        torch.library.opcheck(torch.ops.crossdock.combine.default, (rows, received.ticket, TOKENS, exchange.key))
        arguments: tuple[Any, ...] = (tokens.detach(), received.ticket, exchange.num_rows)
        torch.library.opcheck(torch.ops.crossdock.combine_backward.default, arguments)
        arguments = (rows.detach(), found, received.ticket, TOKENS)
        torch.library.opcheck(torch.ops.crossdock.dispatch_backward.default, arguments)


@pytest.mark.parametrize("mode", MODES)
def test_compiled_without_graph_breaks(mode: ep.Algorithm) -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, exchange_of(comm, mode, num_experts=3) as exchange:
        tokens, indices, weights = problem(0, 3)

        def step(tokens: Any, weights: Any) -> Any:
            return layer(exchange, tokens, indices, weights)

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        result, expected = compiled(tokens, weights), step(tokens, weights)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(
            torch.autograd.grad(result.sum(), (tokens, weights)), torch.autograd.grad(expected.sum(), (tokens, weights))
        )


class Layer(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    """One of many, each with an exchange of its own."""

    def __init__(self, exchange: ept.Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    def forward(self, tokens: Any, indices: Any, weights: Any) -> Any:
        return layer(self.exchange, tokens, indices, weights)


@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_layers_compiles_once(mode: ep.Algorithm) -> None:
    """Layers compiled one by one share a program per shape, whichever exchange they have."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    [comm] = ep.Communicator.create_threads(1)
    counter = CompileCounterWithBackend("aot_eager")
    with comm, contextlib.ExitStack() as stack:
        exchanges = [stack.enter_context(exchange_of(comm, mode, num_experts=3)) for _ in range(12)]
        for num_tokens in (4, 3):
            tokens, indices, weights = problem(0, 3)
            arguments = tokens[:num_tokens], indices[:num_tokens], weights[:num_tokens]
            for exchange in exchanges:
                compiled = torch.compile(Layer(exchange), fullgraph=True, backend=counter, dynamic=False)
                result, expected = compiled(*arguments), layer(exchange, *arguments)
                torch.testing.assert_close(result, expected)
                found, wanted = (torch.autograd.grad(of.sum(), (tokens, weights)) for of in (result, expected))
                torch.testing.assert_close(found, wanted)
        assert counter.frame_count == 2
        whole = torch.nn.ModuleList(map(Layer, exchanges))

        def program(tokens: Any, indices: Any, weights: Any) -> Any:
            for part in whole:
                tokens = part(tokens, indices, weights)
            return tokens

        arguments = problem(0, 3)
        torch.testing.assert_close(
            torch.compile(program, fullgraph=True, backend=counter)(*arguments), program(*arguments)
        )
        assert counter.frame_count == 3


def test_a_ticket_of_another_exchange_is_refused() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, exchange_of(comm, MODES[0]) as one, exchange_of(comm, MODES[0]) as other:
        received = one.dispatch(*problem(0, 2))
        with pytest.raises(ep.InvalidArgument, match="of another exchange"):
            other.combine(received.rows, received)
        one.combine(received.rows, received)


@pytest.mark.parametrize("mode", MODES)
def test_forward_mode_is_refused(mode: ep.Algorithm) -> None:
    """However it is entered, and whether or not backward mode is on: a result would lack its tangent."""
    from torch.autograd import forward_ad

    [comm] = ep.Communicator.create_threads(1)
    with comm, exchange_of(comm, mode) as exchange:
        tokens, indices, weights = problem(0, 2)
        plain = tokens.detach(), weights.detach()

        def split(tokens: Any, weights: Any) -> Any:
            return exchange.start_dispatch(tokens, indices, weights)().rows

        def by_operator(tokens: Any, weights: Any) -> Any:
            return torch.ops.crossdock.dispatch(tokens, indices, weights, exchange.key, exchange.num_rows)[0]

        calls: list[Callable[[Any, Any], Any]] = [
            lambda tokens, weights: layer(exchange, tokens, indices, weights),
            lambda tokens, weights: exchange.dispatch(plain[0], indices, weights).weights,
            split,
            by_operator,
            torch.compile(lambda tokens, weights: layer(exchange, tokens, indices, weights), backend="aot_eager"),
        ]
        for call in calls:
            with forward_ad.dual_level():
                for given in (plain, (tokens, weights)):
                    dual = [forward_ad.make_dual(part, torch.ones_like(part)) for part in given]
                    with pytest.raises((RuntimeError, NotImplementedError), match="forward.mode AD"):
                        call(*dual)
            if call is not by_operator:  # functorch hides tangents from operators
                with pytest.raises(ep.InvalidUsage, match="forward-mode AD .* does not go through"):
                    torch.func.jvp(call, plain, tuple(map(torch.ones_like, plain)))
        received = exchange.dispatch(*plain[:1], indices, plain[1])
        with forward_ad.dual_level():
            rows = forward_ad.make_dual(received.rows, torch.ones_like(received.rows))
            with pytest.raises(ep.InvalidUsage, match="forward-mode AD .* does not go through"):
                exchange.combine(rows, received)
            exchange.combine(received.rows, received)  # without a tangent


class PlainMoe(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    """The layer in one process: all experts, nothing exchanged."""

    def __init__(self, gate: Any, experts: Any, shared: Any) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = gate, experts, shared

    def forward(self, x: Any) -> Any:
        chosen, indices = self.gate(x).topk(TOPK, dim=-1)
        weights = chosen.softmax(dim=-1)
        result = self.shared(x)
        for number, expert in enumerate(self.experts):
            result = result + expert(x) * (weights * (indices == number)).sum(dim=-1, keepdim=True)
        return result


def modules(num_experts: int) -> tuple[Any, list[Any], Any]:
    torch.manual_seed(1)
    make: Callable[[], Any] = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.Linear(HIDDEN, 16), torch.nn.GELU(), torch.nn.Linear(16, HIDDEN)
    )
    return torch.nn.Linear(HIDDEN, num_experts, bias=False), [make() for _ in range(num_experts)], make()


@pytest.mark.parametrize("mode", MODES)
def test_module(mode: ep.Algorithm) -> None:
    """Outputs, gradients of inputs, of the gate and of this rank's experts are those of one process."""
    num_ranks, num_experts = 3, 6
    gate, experts, shared = modules(num_experts)
    plain = PlainMoe(gate, torch.nn.ModuleList(experts), shared)
    inputs = [torch.randn(2, 2, HIDDEN, generator=torch.Generator().manual_seed(rank)) for rank in range(num_ranks)]
    inputs[2] = torch.zeros(0, 2, HIDDEN)  # a rank without tokens
    expected = [plain(x) for x in inputs]
    torch.stack([result.square().sum() for result in expected]).sum().backward()

    def program(comm: ep.Communicator) -> None:
        own_gate, own_experts, own_shared = modules_of_rank[comm.rank]
        mine = own_experts[comm.rank * 2 : comm.rank * 2 + 2]
        with exchange_of(comm, mode) as exchange:
            module = ept.ExpertParallel(exchange, own_gate, mine, own_shared)
            with torch.no_grad():
                torch.testing.assert_close(module(inputs[comm.rank]), expected[comm.rank])
            for module.overlap in (False, True):  # low latency: the shared expert between the halves, if asked for
                module.zero_grad()
                result = module(inputs[comm.rank])
                torch.testing.assert_close(result, expected[comm.rank])
                result.square().sum().backward()
                for expert, parts in enumerate(mine):
                    wholes = experts[comm.rank * 2 + expert].parameters()
                    for own, whole in zip(parts.parameters(), wholes, strict=True):
                        torch.testing.assert_close(own.grad, whole.grad)
        gate_gradients[comm.rank] = own_gate.weight.grad

    gate_gradients: list[Any] = [None] * num_ranks
    modules_of_rank = [modules(num_experts) for _ in range(num_ranks)]
    ep.run_threads(num_ranks, program)
    torch.testing.assert_close(sum(gate_gradients), gate.weight.grad)


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_dispatch_changes_nothing(mode: ep.Algorithm) -> None:
    """Nor does it move this rank on to another place in the windows than its peers'."""

    def program(comm: ep.Communicator) -> None:
        with exchange_of(comm, mode, max_in_flight=2, zero_copy=True) as exchange:
            tokens, indices, weights = problem(comm.rank, 4)
            expected = exchange.dispatch(tokens, indices, weights).rows.clone()
            if comm.rank == 0:
                with pytest.raises(ep.InvalidArgument, match="topk_idx has shape"):
                    exchange.dispatch(tokens, indices[:2], weights)
            for _ in range(3):
                torch.testing.assert_close(exchange.dispatch(tokens, indices, weights).rows, expected)

    ep.run_threads(2, program)


def test_a_shared_expert_that_fails_leaves_no_half() -> None:
    class Fails(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
        def forward(self, x: Any) -> Any:
            raise ValueError("out of order")

    def program(comm: ep.Communicator) -> None:
        gate, experts, shared = modules(4)
        with exchange_of(comm, ep.Algorithm.LOW_LATENCY, num_experts=4, max_in_flight=1) as exchange:
            module = ept.ExpertParallel(exchange, gate, experts[comm.rank * 2 : comm.rank * 2 + 2], Fails())
            with pytest.raises(ValueError, match="out of order"):
                module(torch.zeros(2, HIDDEN))
            module.shared_expert = shared
            module(torch.zeros(2, HIDDEN))

    ep.run_threads(2, program)


@pytest.mark.parametrize("max_in_flight", [1, 5])
def test_receive_halves_that_are_never_called(max_in_flight: int) -> None:
    """A dispatch that was started ends with the function that nobody called, as where a forward pass fails."""

    def program(comm: ep.Communicator) -> None:
        with exchange_of(comm, ep.Algorithm.LOW_LATENCY, max_in_flight=max_in_flight) as exchange:
            arguments = problem(comm.rank, 4)
            expected = exchange.dispatch(*arguments)
            for _ in range(4):
                exchange.start_dispatch(*arguments)
            alive = [exchange.start_dispatch(*arguments) for _ in range(min(2, max_in_flight))]
            for _ in range(3):
                with pytest.raises(ep.InvalidUsage, match="function that start_dispatch returned.*, or drop it"):
                    exchange.start_dispatch(*arguments)
            alive.pop()
            exchange.start_dispatch(*arguments)()
            alive.clear()
            for _ in range(7):
                found = exchange.start_dispatch(*arguments)()
                torch.testing.assert_close(found.rows, expected.rows)
                torch.testing.assert_close(found.experts, expected.experts)
            exchange.start_dispatch(*arguments)

    ep.run_threads(2, program)


def test_tensors_of_torch() -> None:
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    described = ep.Tensor(tensor)
    assert (described.datatype, described.sizes, described.data) == ("bfloat16", (3, 4), tensor.data_ptr())
    assert ep.Tensor(torch.zeros(4, dtype=torch.float8_e4m3fn)).datatype == "float8_e4m3fn"
    for wrong, message in [
        (torch.zeros(4, 4).t(), "not contiguous"),
        (torch.zeros(4, device="meta"), "on device meta, allowed: cpu, cuda"),
        (torch.zeros(4, dtype=torch.complex64), "complex64"),
        (torch.zeros(()), "0 dimensions"),
    ]:
        with pytest.raises(ep.InvalidArgument, match=message):
            ep.Tensor(wrong)


def test_a_tensor_that_was_resized_is_noticed() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.Group(comm, num_experts=1, max_dispatch_tokens_per_rank=2, max_token_bytes=64) as group:
        routing = torch.zeros(1, 1, dtype=torch.int64)
        described = ep.Tensor(routing)
        with group.create_handle(ep.Layout.EXPERT_MAJOR, described) as handle:
            routing.resize_(1000, 1000)
            with pytest.raises(ep.InvalidUsage, match="memory has moved"):
                handle.update(described)


class Pair(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    def forward(self, x: Any) -> Any:
        return x, None


def test_wrong_use() -> None:
    [comm] = ep.Communicator.create_threads(1)
    exchange = exchange_of(comm, ep.Algorithm.HIGH_THROUGHPUT, max_in_flight=1)
    tokens, indices, weights = problem(0, 2)
    first = exchange.dispatch(tokens, indices, weights)
    with pytest.raises(ep.InvalidArgument, match=r"topk_weights has shape \[4, 1\], expected \[4, 2\]"):
        exchange.dispatch(tokens, indices, weights[:, :1])
    calls: list[tuple[tuple[Any, ...], str]] = [
        ((tokens.detach().to_sparse(), indices, weights), "tokens is of layout torch.sparse_coo, allowed: dense"),
        ((tokens, indices, [[0.5, 0.5]]), "topk_weights is of type list, expected a torch.Tensor"),
        ((tokens, indices.float(), weights), "topk_idx is of type torch.float32, allowed: torch.int32"),
        ((tokens, indices, weights.double()), "topk_weights is of type torch.float64, allowed: torch.float32"),
    ]
    for arguments, message in calls:
        with pytest.raises(ep.InvalidArgument, match=message):
            exchange.dispatch(*arguments)
    with pytest.raises(ep.InvalidArgument, match="rows is of layout torch.sparse_coo, allowed: dense"):
        exchange.combine(first.rows.detach().to_sparse(), first)
    with pytest.raises(ep.InvalidArgument, match=r"rows has shape \[2, 8\], expected \[6, H\], as received.rows"):
        exchange.combine(first.rows[:2], first)
    with pytest.raises(ep.InvalidArgument, match="received is of type tuple, expected what dispatch returned"):
        exchange.combine(first.rows, tuple(first))  # type: ignore[arg-type]
    with pytest.raises(ep.InvalidArgument, match="experts has 1 modules, expected .*: a row is for expert 1"):
        ept.apply_experts([torch.nn.Identity()], first)
    with pytest.raises(ep.InvalidArgument, match="experts is of type function, expected one module for each"):
        ept.apply_experts(lambda rows: rows, first)  # type: ignore[arg-type]
    with pytest.raises(ep.InvalidArgument, match="received is of type tuple, expected what dispatch returned"):
        ept.apply_experts([torch.nn.Identity()] * 2, tuple(first))  # type: ignore[arg-type]
    exchange.combine(first.rows, first)  # it is still open
    exchange.dispatch(tokens, indices, weights)
    with pytest.raises(ep.InvalidUsage, match="dispatch 0 of this exchange is too long ago, 1 came since"):
        exchange.combine(first.rows, first)
    with pytest.raises(ep.InvalidArgument, match="experts has 1 modules, expected .* 2 experts"):
        ept.ExpertParallel(exchange, torch.nn.Linear(8, 2), [torch.nn.Identity()])
    gated = ept.ExpertParallel(exchange, torch.nn.Linear(HIDDEN, 3), [torch.nn.Identity()] * 2)
    with pytest.raises(ep.InvalidArgument, match="gate has returned 3 logits per token, expected 2"):
        gated(tokens)
    gated = ept.ExpertParallel(exchange, Pair(), [torch.nn.Identity()] * 2)
    with pytest.raises(ep.InvalidArgument, match="gate has returned an object of type tuple, expected logits"):
        gated(tokens)
    with pytest.raises(ep.InvalidArgument, match="max_in_flight is 0"):
        exchange_of(comm, ep.Algorithm.LOW_LATENCY, max_in_flight=0)
    for fields, message in (
        ({"num_topk": 9}, "num_topk is 9, allowed: at most num_experts"),
        ({"max_tokens": 1 << 30}, "^max_tokens is 1073741824, allowed: at most"),
        ({"max_in_flight": 1.5}, "max_in_flight is 1.5, allowed: whole numbers from 1 to 65536"),
        ({"max_in_flight": 2**40}, "max_in_flight is 1099511627776, allowed: whole numbers from 1 to 65536"),
        ({"zero_copy": ep.ZeroCopyMode.OFF}, "zero_copy is ZeroCopyMode.OFF, allowed: True, False"),
        ({"zero_copy": "no"}, "zero_copy is 'no', allowed: True, False"),
        ({"max_rows": 7, "max_recv_tokens_per_rank": 4}, "max_recv_tokens_per_rank is 4, .*: pass max_rows instead"),
        ({"max_dispatch_tokens_per_rank": 4}, "max_dispatch_tokens_per_rank is 4, .*: pass max_tokens instead"),
        ({"max_token_bytes": 128}, "max_token_bytes is 128, an Exchange sets it: pass hidden instead"),
        ({"hidden": -4}, "hidden is -4, allowed: whole numbers from 1 on"),
        ({"hidden": 6}, "hidden is 6, allowed with torch.float32: multiples of 4"),
        ({"max_tokens": 0}, "max_tokens is 0, allowed: whole numbers from 1 on"),
        ({"recipe": 3}, "recipe is 3, expected one of crossdock.DispatchQuantizationRecipe"),
    ):
        with pytest.raises(ep.InvalidArgument, match=message):
            exchange_of(comm, ep.Algorithm.HIGH_THROUGHPUT, **fields)
    with pytest.raises(ep.InvalidUsage, match="invariant is True, allowed: False: .* TokenSwitch"):
        exchange_of(comm, ep.Algorithm.HIGH_THROUGHPUT, invariant=True)
    with pytest.raises(ep.InvalidUsage, match="enable_mask is for low latency, .* high throughput: ht_masks"):
        exchange_of(comm, ep.Algorithm.HIGH_THROUGHPUT, enable_mask=True)
    for mode, name in ((ep.Algorithm.HIGH_THROUGHPUT, "ht_masks"), (ep.Algorithm.LOW_LATENCY, "enable_mask")):
        with exchange_of(comm, mode, **{name: True}) as masked:
            assert list(masked.group.mask_query()) == [True]
    with pytest.raises(ep.InvalidUsage, match="torch.distributed is not initialised"):
        ept.communicator_of()
    with pytest.raises(ep.InvalidArgument, match="num_experts is 3, allowed: positive multiples of the 2 ranks"):
        ep.run_threads(2, lambda comm: exchange_of(comm, ep.Algorithm.LOW_LATENCY, num_experts=3))
    with pytest.raises(ep.InvalidArgument, match="comm is of type str, allowed: Communicator, an object"):
        ept.Exchange("ranks", num_experts=2, num_topk=1, max_tokens=1, hidden=8)
    exchange.close()
    exchange.close()
    with pytest.raises(ep.InvalidUsage, match="is closed"):
        exchange.dispatch(tokens, indices, weights)
    comm.close()


@pytest.mark.parametrize("mode", MODES)
def test_tensors_on_other_devices(mode: ep.Algorithm) -> None:
    """They are refused, also in a compiled program, which would run the fake kernels instead; fake tensors are not."""
    from torch.fx.experimental.proxy_tensor import make_fx

    [comm] = ep.Communicator.create_threads(1)
    with comm, exchange_of(comm, mode) as exchange:
        arguments = problem(0, 2)
        received = exchange.dispatch(*arguments)
        names = ("tokens", "topk_idx", "topk_weights")
        compiled = torch.compile(exchange.dispatch, backend="aot_eager")
        for dispatch in (exchange.dispatch, exchange.start_dispatch, compiled):
            for i, name in enumerate(names):
                wrong = [part.to("meta") if of == name else part for of, part in zip(names, arguments, strict=True)]
                message = f"^{name} is on meta, expected: cpu{', as tokens' if i > 0 else ''}$"
                with pytest.raises(ep.InvalidArgument, match=message):
                    dispatch(*wrong)
        shapes = exchange.dispatch(*(part.to("meta") for part in arguments))
        assert shapes.rows.is_meta and shapes.rows.shape == received.rows.shape
        make_fx(lambda *given: exchange.dispatch(*given), tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
        whole = torch.compile(Layer(exchange), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(whole(*arguments), layer(exchange, *arguments))


@pytest.mark.parametrize("mode", MODES)
def test_experts_that_return_something_else(mode: ep.Algorithm) -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, exchange_of(comm, mode) as exchange:
        received = exchange.dispatch(torch.ones(3, HIDDEN), torch.tensor([[0, 1]] * 3), torch.ones(3, TOPK))
        wrong: list[tuple[Callable[[Any], Any], str]] = [
            (lambda rows: rows[:1], r"\[1, 8\] of torch.float32, expected: \[3, 8\] of torch.float32"),
            (lambda rows: rows[:, :1], r"\[3, 1\] of torch.float32, expected: \[3, 8\]"),
            (lambda rows: rows.double(), r"\[3, 8\] of torch.float64, expected: \[3, 8\] of torch.float32"),
            (lambda rows: (rows, None), "an object of type tuple, expected a tensor"),
        ]
        for expert, message in wrong:
            with pytest.raises(ep.InvalidArgument, match=f"^expert 1 returned {message}"):
                ept.apply_experts([torch.nn.Identity(), expert], received)  # type: ignore[list-item]
        linear = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2)]
        with torch.autocast("cpu", dtype=torch.bfloat16):  # their results are bfloat16, but not once weighted
            assert ept.apply_experts(linear, received).dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_errors_name_the_arguments_of_an_exchange(mode: ep.Algorithm) -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm:
        with exchange_of(comm, mode) as exchange:
            received = exchange.dispatch(*problem(0, 2))
            for wrong, message in (
                (received.rows.repeat(1, 2), "^rows has rows of 64 bytes, allowed: at most those of hidden .*32"),
                (received.rows.double(), "^rows is of type float64"),
            ):
                with pytest.raises(ep.InvalidArgument, match=message):
                    exchange.combine(wrong, received)
        recipe, kind = ep.DispatchQuantizationRecipe.DS_FP8E3M4, torch.bfloat16
        with exchange_of(comm, mode, recipe=recipe, dtype=kind, hidden=128) as exchange:
            _, indices, weights = problem(0, 2)
            for tokens in (torch.ones(TOKENS, 64, dtype=kind), torch.ones(TOKENS, 128), torch.ones(TOKENS, 128).half()):
                message = f"^tokens is .* of {tokens.dtype}, allowed with .*: .* multiples of 128. of torch.bfloat16"
                with pytest.raises(ep.InvalidArgument, match=message):
                    exchange.dispatch(tokens, indices, weights)


def test_more_rows_than_max_rows() -> None:
    def program(comm: ep.Communicator) -> None:
        with exchange_of(comm, ep.Algorithm.HIGH_THROUGHPUT, max_rows=6) as exchange:
            with pytest.raises(ep.InvalidUsage, match="8 rows .* came to rank 0, whose max_rows is 6"):
                exchange.dispatch(torch.ones(4, HIDDEN), torch.tensor([[0, 1]] * 4), torch.ones(4, TOPK))

    ep.run_threads(2, program)


def test_a_backward_pass_after_its_exchange() -> None:
    [comm] = ep.Communicator.create_threads(1)
    exchange = exchange_of(comm, ep.Algorithm.HIGH_THROUGHPUT)
    group, result = exchange.group, layer(exchange, *problem(0, 2))
    del exchange
    gc.collect()
    with pytest.raises(ep.InvalidUsage, match="nothing refers to it any more: keep it until backward"):
        result.sum().backward()
    group.close()
    comm.close()


def test_wrong_recipes() -> None:
    [comm] = ep.Communicator.create_threads(1)
    fp8, nvfp4 = ep.DispatchQuantizationRecipe.DS_FP8E3M4, ep.CombineQuantizationRecipe.NVFP4
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"recipe": fp8}, "dtype is torch.float32 and hidden 8, allowed with recipe DS_FP8E3M4: torch.bfloat16"),
        ({"recipe": fp8, "dtype": torch.bfloat16, "hidden": 64}, "hidden 64, allowed .* multiples of 128"),
        ({"recipe": ep.DispatchQuantizationRecipe.FWD}, "recipe is FWD"),
        ({"combine_recipe": nvfp4, "dtype": torch.bfloat16}, "hidden 8, allowed with combine_recipe NVFP4"),
        ({"combine_recipe": ep.CombineQuantizationRecipe.MXFP8}, "combine_recipe is MXFP8, allowed here: NONE, NVFP4"),
        ({"recipe": fp8, "dtype": torch.bfloat16, "hidden": 128, "zero_copy": True}, "exclude each other"),
    ]
    for fields, message in wrong:
        with pytest.raises(ep.Error, match=message):
            exchange_of(comm, ep.Algorithm.LOW_LATENCY, **fields)
    with pytest.raises(ep.InvalidArgument, match="algorithm is HIGH_THROUGHPUT"):
        exchange_of(comm, ep.Algorithm.HIGH_THROUGHPUT, combine_recipe=nvfp4, dtype=torch.bfloat16, hidden=64)
    comm.close()


def test_nvfp4_keeps_a_nan() -> None:
    scales = nvfp4_scales(torch.tensor([[float("nan"), 1.0], [0.0, 0.0], [-2.0, 1.0]]))
    assert scales.isnan().tolist() == [[True], [False], [False]] and scales[1:].tolist() == [[0.0], [1344.0]]


@pytest.mark.parametrize("mode", MODES)
def test_an_exchange_that_cannot_be_made_leaves_nothing(mode: ep.Algorithm) -> None:
    [comm] = ep.Communicator.create_threads(1)
    with pytest.raises(ep.Error, match="num_topk"):
        exchange_of(comm, mode, num_experts=4, num_topk=65)
    with pytest.raises(ep.InvalidArgument, match="dtype is torch.float64, allowed: torch.bfloat16, torch.float16"):
        exchange_of(comm, mode, dtype=torch.float64)
    comm.close()  # refused while there are groups or windows


def test_an_exchange_whose_memory_is_refused_closes_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *shape: int, dtype: Any) -> Any:
        raise KeyboardInterrupt

    [comm] = ep.Communicator.create_threads(1)
    monkeypatch.setattr(ept.SymmetricMemory, "empty", refuse)
    with pytest.raises(KeyboardInterrupt):
        exchange_of(comm, ep.Algorithm.LOW_LATENCY, zero_copy=True)
    comm.close()


def test_symmetric_memory() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm:
        with pytest.raises(ep.InvalidArgument, match="num_bytes is 0"):
            ept.SymmetricMemory(comm, 0)
        with pytest.raises(ep.InvalidArgument, match="num_bytes is '64'"):
            ept.SymmetricMemory(comm, "64")  # type: ignore[arg-type]
        with ept.SymmetricMemory(comm, 1000) as memory:
            for shape in ((2, 3), [2, 3], torch.Size((2, 3))):
                assert memory.empty(shape).shape == (2, 3)
        with ept.SymmetricMemory(comm, 1000) as memory:
            first, second = memory.empty(4, 5), memory.empty(2, 2, 2, dtype=torch.bfloat16)
            assert (first.shape, second.dtype, first.sum().item()) == ((4, 5), torch.bfloat16, 0)
            assert memory.of(second[1]).data == second[1].data_ptr()
            wrong: list[tuple[Any, Any, str]] = [
                ((2.5,), torch.float32, r"shape is \(2.5,\), allowed: whole numbers"),
                (((2, 3), 4), torch.float32, r"shape is \(\(2, 3\), 4\), allowed: whole numbers"),
                ((2**70,), torch.float32, "488 of the memory's 1000 bytes are left"),
                ((2,), "float32", "dtype is 'float32', expected a torch.dtype"),
            ]
            for shape, kind, message in wrong:
                with pytest.raises(ep.InvalidArgument, match=message):
                    memory.empty(*shape, dtype=kind)
            with pytest.raises(ep.InvalidArgument, match="does not lie in this memory"):
                memory.of([1.0])  # type: ignore[arg-type]
            with pytest.raises(ep.InvalidArgument, match="1200 bytes; 488 of the memory's 1000 bytes are left"):
                memory.empty(300)
            with pytest.raises(ep.InvalidArgument, match=r"shape is \[-1, 4\], allowed: extents of 0 and more"):
                memory.empty(-1, 4)
            with pytest.raises(ep.InvalidArgument, match="does not lie in this memory"):
                memory.of(torch.zeros(3))
            with pytest.raises(ep.InvalidUsage, match="open groups or windows"):
                comm.close()
        with pytest.raises(ep.InvalidUsage, match="memory is closed"):
            memory.empty(1)
        first.fill_(1)  # ordinary memory by now
        memory.close()
        with ept.SymmetricMemory(comm, 300) as memory:
            memory.empty(75)  # all of it, without what would align another tensor
            assert memory.empty(0).shape == (0,)
            with pytest.raises(ep.InvalidArgument, match="4 bytes; 0 of the memory's 300 bytes are left"):
                memory.empty(1)


def distributed(rank: int, num_ranks: int, path: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=num_ranks)
    with ept.communicator_of() as comm:
        assert (comm.rank, comm.num_ranks) == (rank, num_ranks)
        with exchange_of(comm, ep.Algorithm.HIGH_THROUGHPUT) as exchange:
            arguments = problem(rank, 2 * num_ranks)
            torch.testing.assert_close(layer(exchange, *arguments), plain_layer(*arguments))
    alone = torch.distributed.new_group([0])
    if rank == 0:
        with ept.communicator_of(alone) as comm:
            assert comm.num_ranks == 1
    else:
        with pytest.raises(ep.InvalidUsage, match="rank 1 is not in the process group"):
            ept.communicator_of(alone)
    torch.distributed.destroy_process_group()


def test_process_groups_of_gloo(tmp_path: Any) -> None:
    torch.multiprocessing.start_processes(
        distributed, (2, str(tmp_path / "store")), nprocs=2, start_method="forkserver"
    )
