# SPDX-License-Identifier: Apache-2.0
"""copy, pickle and torch.save of the package's objects: values are copied, what ranks have in common is shared, all
else is refused with what to do instead."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossdock as ep

GROUP = {"num_experts": 2, "max_dispatch_tokens_per_rank": 4, "max_token_bytes": 64}


def expect_shared(thing: Any, remedy: str) -> None:
    assert copy.copy(thing) is thing and copy.deepcopy([thing])[0] is thing
    expect_not_pickled(thing, remedy)


def expect_not_pickled(thing: Any, remedy: str) -> None:
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        with pytest.raises(
            ep.NotCopyable, match=rf"^{type(thing).__name__} cannot be (copied or )?pickled, .*{remedy}"
        ):
            pickle.dumps({"held": thing}, protocol)


def expect_uncopied(thing: Any, remedy: str, shallow: bool = False) -> None:
    if not shallow:
        with pytest.raises(ep.NotCopyable, match=f"^{type(thing).__name__} cannot be copied"):
            copy.copy(thing)
    with pytest.raises(ep.NotCopyable, match=f"^{type(thing).__name__} cannot be copied or pickled, .*{remedy}"):
        copy.deepcopy([thing])
    expect_not_pickled(thing, remedy)


def test_of_the_library() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.Group(comm, **GROUP) as group:
        handle = group.init_handle(ep.Layout.EXPERT_MAJOR, 1)
        memory = ep.Memory(64)
        window = comm.register_window(memory)
        expect_shared(comm, "crossdock.torch.communicator_of.* or with Communicator.join")
        expect_shared(group, "Group\\(communicator, ...\\)")
        expect_uncopied(handle, "Group.init_handle")
        expect_uncopied(window, "Communicator.register_window")
        expect_uncopied(memory, "copy its bytes")
        expect_uncopied(ep.Tensor(memory), "another one of the array")
        window.close()
        with ep.A2sgd(comm, [np.zeros(4, np.float32)]) as averager:
            expect_uncopied(averager, "A2sgd\\(communicator, pieces\\)")


def test_ranks_in_processes_are_told() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, pytest.raises(ep.NotCopyable, match="run_processes gives each rank its own"):
        ep.run_processes(1, print, comm)
    assert issubclass(ep.NotCopyable, ep.InvalidUsage) and issubclass(ep.NotCopyable, TypeError)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_values(again: Callable[[Any], Any]) -> None:
    config = ep.GroupConfig(**GROUP, algorithm=ep.Algorithm.HIGH_THROUGHPUT, enable_mask=True)
    made: Any = again(config)
    assert made is not config
    assert (made.num_experts, made.algorithm, made.enable_mask) == (2, ep.Algorithm.HIGH_THROUGHPUT, True)
    made.num_experts = 4
    assert config.num_experts == 2
    assert again(ep.HandleConfig(dispatch_output_per_expert_alignment=8)).dispatch_output_per_expert_alignment == 8
    recipe = ep.DispatchQuantizationRecipe.DS_FP8E3M4
    assert again(ep.DispatchConfig(quant_recipe=recipe, send_only=True)).quant_recipe == recipe
    assert again(ep.CombineConfig(send_only=True)).send_only
    tokens = np.arange(4, dtype=np.float32)
    for kind in (ep.DispatchInputs, ep.DispatchOutputs, ep.CombineInputs, ep.CombineOutputs):
        found = again(kind(tokens=tokens))
        inside: Any = found.tokens
        assert type(found) is kind and np.array_equal(inside, tokens)
        assert (inside is tokens) == (again is copy.copy)
    made = again(ep.LayoutInfo(expert_counters=tokens))
    assert np.array_equal(made.expert_counters, tokens)


def test_hooks_are_copied_here_and_not_pickled() -> None:
    config = ep.GroupConfig(**GROUP, alloc=ep.AllocConfig(alloc_fn=8, free_fn=16, context=24))
    for made in (copy.copy(config), copy.deepcopy(config)):
        assert (made.alloc.alloc_fn, made.alloc.free_fn, made.alloc.context) == (8, 16, 24)
    assert copy.copy(config.alloc).alloc_fn == 8
    with pytest.raises(ep.NotCopyable, match="^AllocConfig cannot be pickled, .* addresses here"):
        pickle.dumps(config)


def test_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: skipped")
    import crossdock.a2sgd as a2sgd
    import crossdock.deep_ep as deep_ep
    import crossdock.torch as ept

    [comm] = ep.Communicator.create_threads(1)
    with comm, ept.Exchange(comm, num_experts=2, num_topk=1, max_tokens=4, hidden=8) as exchange:
        expect_shared(exchange, "state_dict.* Exchange\\(communicator_of\\(process_group\\)")
        layer = ept.ExpertParallel(exchange, torch.nn.Linear(8, 2), [torch.nn.Linear(8, 8) for _ in range(2)])
        with pytest.raises(ep.NotCopyable, match="^Exchange cannot be pickled"):
            torch.save(layer, io.BytesIO())
        saved = io.BytesIO()
        torch.save(layer.state_dict(), saved)
        saved.seek(0)
        layer.load_state_dict(torch.load(saved))
        with ept.SymmetricMemory(comm, 64) as memory:
            expect_shared(memory, "SymmetricMemory\\(communicator, num_bytes\\)")
        optimizer = a2sgd.Optimizer(torch.optim.SGD(layer.parameters()), comm)
        expect_uncopied(optimizer, "state_dict")

        x, ids, weights = torch.ones(3, 128).bfloat16(), torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
        buffer: Any = deep_ep.Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
        expect_shared(buffer, "Buffer\\(process_group, ...\\)")
        counts = buffer.get_dispatch_layout(ids, 2)
        rows, _, _, _, handle, _ = buffer.dispatch(x, None, counts[0], None, counts[3], counts[2], ids, weights)
        expect_uncopied(handle, "dispatch again", shallow=True)
        assert torch.equal(copy.deepcopy(buffer).combine(rows, copy.copy(handle))[0], x)
        rows, _, handle, event, _ = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False, async_finish=True)
        expect_uncopied(handle, "dispatch again", shallow=True)
        assert torch.equal(buffer.low_latency_combine(rows, ids, weights, copy.copy(handle))[0], x)
        expect_uncopied(event, "where its call was made")
        expect_uncopied(deep_ep.EventHandle(), "where its call was made")
        buffer.destroy()

        buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=4, explicitly_destroy=True)
        expect_shared(buffer, "ElasticBuffer\\(process_group, ...\\)")
        rows, _, _, handle, _ = buffer.dispatch(x, ids, weights, num_experts=2)
        expect_uncopied(handle, "dispatch again", shallow=True)
        other = copy.copy(handle)
        assert other is not handle and torch.equal(buffer.combine(rows, other)[0], x)
        buffer.destroy()
        assert copy.deepcopy(deep_ep.Config(8)).get_nvl_buffer_size_hint(64, 2) > 0


def test_a_copy_of_a_module_is_an_average_of_its_weights() -> None:
    """Each step also updates and calls a deep copy, as for an exponential moving average."""
    torch = pytest.importorskip("torch", reason="torch is not installed: skipped")
    import crossdock.torch as ept

    def program(comm: ep.Communicator) -> None:
        with ept.Exchange(comm, num_experts=2, num_topk=1, max_tokens=4, hidden=8, max_in_flight=2) as exchange:
            layer = ept.ExpertParallel(exchange, torch.nn.Linear(8, 2, bias=False), [torch.nn.Linear(8, 8)])
            average = copy.deepcopy(layer).requires_grad_(False)
            assert average.exchange is exchange
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            x = torch.ones(3, 8) + comm.rank
            first = average(x)
            torch.testing.assert_close(layer(x), first)
            for _ in range(5):
                optimizer.zero_grad()
                layer(x).square().sum().backward()
                optimizer.step()
                for kept, own in zip(average.parameters(), layer.parameters(), strict=True):
                    kept.lerp_(own, 0.5)
                average(x)
            assert not torch.equal(average(x), first) and not torch.equal(average(x), layer(x))

    torch.manual_seed(0)
    ep.run_threads(2, program)
