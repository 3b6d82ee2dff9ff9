# SPDX-License-Identifier: Apache-2.0
"""crossdock.a2sgd: optimizer, DDP hook, averaging, drift, and the parts of the study; needs torch."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossdock as ep
from test_a2sgd import gradient_of, moved

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import crossdock.a2sgd as a2  # noqa: E402

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_of_torch(dtype: str) -> None:
    def program(comm: ep.Communicator) -> None:
        kind = getattr(torch, dtype)
        everybody = [torch.from_numpy(gradient_of(rank)).to(kind) for rank in range(comm.num_ranks)]
        gradient = everybody[comm.rank].clone()
        with ep.A2sgd(comm, [gradient]) as averager:
            averager.begin()
            averager.end()
        expected = moved([g.float().numpy() for g in everybody], comm.rank)
        bound = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
        assert np.abs(gradient.float().numpy() - expected).max() < bound

    ep.run_threads(2, program)


def model_of() -> Any:
    """The same everywhere; without torch's own generator, which threads share."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.4)
    return model


def backward(model: Any, rank: int, step: int) -> None:
    random = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(8, 6, generator=random)).square().mean().backward()


def flat_gradient(model: Any) -> Any:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("scope", ["model", "group"])
def test_optimizer_steps_with_moved_gradients(scope: Any) -> None:
    def program(comm: ep.Communicator) -> None:
        model, plain = model_of(), model_of()
        groups = [{"params": [p]} for p in model.parameters()] if scope == "group" else model.parameters()
        with a2.Optimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9), comm, scope=scope) as optimizer:
            reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
            for step in range(4):
                optimizer.zero_grad()
                reference.zero_grad()
                backward(model, comm.rank, step)
                backward(plain, comm.rank, step)
                sent = np.concatenate([p.grad.numpy().ravel() for p in plain.parameters()]).tobytes()
                everybody = [np.frombuffer(bytes_, np.float32) for bytes_ in comm.all_gather(sent)]
                first = 0
                for parameter in plain.parameters():
                    part = slice(first, first + parameter.numel())
                    first = part.stop
                    own = [g[part] for g in everybody] if scope == "group" else everybody
                    new = moved(own, comm.rank)[slice(None) if scope == "group" else part]
                    parameter.grad.copy_(torch.from_numpy(new).view(parameter.shape))
                optimizer.begin()
                optimizer.step()
                reference.step()
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    ep.run_threads(3, program)


def test_replicas_drift_and_come_together() -> None:
    def program(comm: ep.Communicator) -> list[float]:
        model = model_of()
        seen = [a2.drift(model.parameters(), comm).relative]
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with a2.Optimizer(inner, comm, average_every=3) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                backward(model, comm.rank, step)
                optimizer.step()
                seen.append(a2.drift(model.parameters(), comm).relative)
        return seen

    first, second = ep.run_threads(2, program)
    assert first == second
    assert first[0] == 0 and 0 < first[1] < first[2] and first[3] < 1e-7


def test_parameters_that_need_no_gradient_stay() -> None:
    def program(comm: ep.Communicator) -> None:
        model = model_of()
        model[0].requires_grad_(False)
        before = model[0].weight.clone()
        with a2.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm) as optimizer:
            for step in range(2):
                optimizer.zero_grad()
                backward(model, comm.rank, step)
                optimizer.step()
        assert torch.equal(model[0].weight, before) and model[0].weight.grad is None

    ep.run_threads(2, program)


def test_a_step_with_nan_is_skipped_by_all() -> None:
    def program(comm: ep.Communicator) -> None:
        model = model_of()
        before = [p.detach().clone() for p in model.parameters()]
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        names = model.named_parameters()
        with a2.Optimizer(inner, comm, skip_nonfinite=True, names=names) as optimizer:
            backward(model, comm.rank, 0)
            if comm.rank == 1:
                model[2].weight.grad[0, 0] = float("nan")
            optimizer.step()
            report = optimizer.reports()[0]
            assert report.skipped and report.nonfinite_rank == 1 and report.nonfinite_name == "2.weight"
            assert optimizer.num_skipped == 1
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            with pytest.raises(ep.InvalidUsage, match="closure"):
                optimizer.step(lambda: 0.0)

    ep.run_threads(2, program)


def test_a_closed_optimizer_refuses_steps() -> None:
    def program(comm: ep.Communicator) -> None:
        model = model_of()
        optimizer = a2.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
        backward(model, comm.rank, 0)
        optimizer.begin()
        optimizer.close()
        optimizer.close()
        before = [p.detach().clone() for p in model.parameters()]
        for call in (optimizer.step, optimizer.begin):
            with pytest.raises(ep.InvalidUsage, match="the Optimizer is closed"):
                call()
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

    ep.run_threads(2, program)


def test_gradients_that_change_between_the_halves_are_refused() -> None:
    def program(comm: ep.Communicator) -> None:
        model = model_of()
        with a2.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm) as optimizer:
            backward(model, comm.rank, 0)
            optimizer.begin()
            own = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            with pytest.raises(ep.InvalidUsage, match=r"4 gradients are not those that begin\(\) read"):
                optimizer.step()
            for parameter, gradient in zip(model.parameters(), own, strict=True):
                parameter.grad = gradient
            optimizer.step()
            assert optimizer.num_steps == 1

    ep.run_threads(2, program)


def test_parameters_that_are_frozen_later_are_refused() -> None:
    def program(comm: ep.Communicator) -> None:
        model = model_of()
        with a2.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm) as optimizer:
            model[0].requires_grad_(False)
            with pytest.raises(ep.InvalidUsage, match="0 of the .* are new .*, and 2 need no gradient any more"):
                optimizer.step()

    ep.run_threads(2, program)


@pytest.mark.parametrize("change", ["add_param_group", "requires_grad"])
def test_new_parameters_are_refused(change: str) -> None:
    def program(comm: ep.Communicator) -> None:
        model, other = model_of(), model_of()
        model[0].requires_grad_(False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with a2.Optimizer(inner, comm) as optimizer:
            backward(model, comm.rank, 0)
            optimizer.step()
            if change == "add_param_group":
                inner.add_param_group({"params": list(other[0].parameters())})
            else:
                model[0].requires_grad_(True)
            with pytest.raises(
                ep.InvalidUsage, match="2 of the optimizer's parameters are new .* make it anew on all ranks"
            ):
                optimizer.step()
        with a2.Optimizer(inner, comm) as optimizer:
            optimizer.step()

    ep.run_threads(2, program)


def test_drift_of_replicas_without_a_mean() -> None:
    """The mean of opposite replicas is 0, that of a NaN none."""

    def program(comm: ep.Communicator) -> None:
        opposite = torch.tensor([3.0, 4.0]) * (1 if comm.rank else -1)
        assert a2.drift([opposite], comm) == a2.Drift(5.0, math.inf)
        assert a2.drift([torch.zeros(2)], comm) == a2.Drift(0.0, 0.0)
        found = a2.drift([torch.tensor([1.0, math.nan if comm.rank else 1.0])], comm)
        assert math.isnan(found.distance) and math.isnan(found.relative)

    ep.run_threads(2, program)


@pytest.mark.parametrize("collective", [a2.average_parameters, a2.drift])
def test_tensors_without_means_are_refused(collective: Any) -> None:
    def program(comm: ep.Communicator) -> None:
        with pytest.raises(ep.InvalidArgument, match="parameters is empty, allowed: one tensor or more"):
            collective([], comm)
        for dtype in (torch.complex64, torch.int64, torch.bool):
            with pytest.raises(ep.InvalidArgument, match=rf"parameters\[1\] is of {dtype}, allowed: .* floating point"):
                collective([torch.ones(2), torch.ones(2, dtype=dtype)], comm)
        for other in ([torch.ones(3, 2)], [torch.ones(2, 3).double()], [torch.ones(3), torch.ones(3)]):
            with pytest.raises(
                ep.InvalidUsage, match=r"differ between ranks in number, .*: ranks \[2\] have others than rank 0"
            ):
                collective(other if comm.rank == 2 else [torch.ones(2, 3)], comm)
        collective([torch.ones(2, dtype=torch.bfloat16), torch.ones(2, 3).double()], comm)

    ep.run_threads(3, program)


def _train_with_ddp(rank: int, port: int, folder: str) -> None:
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    _train(rank, "model")
    _train(rank, "bucket")
    dist.destroy_process_group()
    Path(folder, f"{rank}").touch()


def _train(rank: int, scope: Any) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, plain = model_of(), model_of()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0003)  # some buckets
    state = a2.HookState(scope=scope)
    with pytest.raises(ep.InvalidUsage, match="bucket 0 has no report, those with one: none yet"):
        state.report()
    wrapped.register_comm_hook(state, a2.hook)
    for step in range(3):
        wrapped.zero_grad()
        plain.zero_grad()
        backward(wrapped, rank, step)
        backward(plain, rank, step)
        own = flat_gradient(plain)
        everybody = [torch.zeros_like(own) for _ in range(2)]
        dist.all_gather(everybody, own)
        if scope == "model":
            expected = moved([g.numpy() for g in everybody], rank)
            np.testing.assert_allclose(flat_gradient(model).numpy(), expected, rtol=0, atol=2e-6)
            assert state.report().step >= 1
    assert not torch.equal(flat_gradient(model), flat_gradient(plain))
    drift = a2.drift(model.parameters())
    assert drift.distance == 0  # nobody has stepped
    with pytest.raises(
        ep.InvalidUsage, match=r"differ between ranks in number, .*: ranks \[1\] have others than rank 0"
    ):
        a2.average_parameters([torch.ones(2 + rank)])
    state.close()


def test_ddp_hook(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(_train_with_ddp, (port, str(tmp_path)), nprocs=2, start_method="forkserver")
    assert len(list(tmp_path.iterdir())) == 2


def test_scopes_are_checked() -> None:
    def program(comm: ep.Communicator) -> None:
        inner = torch.optim.SGD(model_of().parameters(), lr=0.1)
        with pytest.raises(ep.InvalidArgument, match="scope is 'layer'"):
            a2.Optimizer(inner, comm, scope="layer")  # type: ignore[arg-type]
        with pytest.raises(ep.InvalidArgument, match="average_every is -1"):
            a2.Optimizer(inner, comm, average_every=-1)
        with pytest.raises(ep.InvalidArgument, match=r"average_every is 0.5, allowed: 0"):
            a2.Optimizer(inner, comm, average_every=0.5)  # type: ignore[arg-type]
        with pytest.raises(ep.InvalidArgument, match=r"optimizer is a list, expected: one of torch.optim"):
            a2.Optimizer([inner], comm)  # type: ignore[arg-type]
        with pytest.raises(ep.InvalidArgument, match="communicator is a SGD, expected: a Communicator"):
            a2.Optimizer(inner, inner)  # type: ignore[arg-type]
        with pytest.raises(ep.InvalidArgument, match="sums is 'fp8', allowed: 'fp32', 'fp64'"):
            a2.Optimizer(inner, comm, sums="fp8")

    ep.run_threads(1, program)


def test_options_of_the_hook_are_checked_where_it_is_made() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        a2.HookState(foo=1)  # type: ignore[call-arg]
    with pytest.raises(ep.InvalidArgument, match="sums is 'fp8', allowed: 'fp32', 'fp64'"):
        a2.HookState(sums="fp8")


@pytest.mark.parametrize("arm", ["dense", "a2sgd", "top-k", "qsgd", "none"])
def test_the_studys_arms(arm: str) -> None:
    from crossdock.a2sgd.study.arms import make_arm

    gradients = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1))
    before = gradients.clone()
    averaging = make_arm(arm, gradients, 1)
    averaging.average(gradients)
    mean = before.mean(dim=0)
    if arm == "dense":
        torch.testing.assert_close(gradients, mean.expand(4, -1))
        assert averaging.message_bits() == 96000
    elif arm == "a2sgd":
        for rank in range(4):
            np.testing.assert_allclose(gradients[rank].numpy(), moved(list(before.numpy()), rank), rtol=0, atol=2e-6)
        assert averaging.message_bits() == 64
    elif arm == "top-k":
        assert int((gradients[0] != 0).sum()) <= 4 * 3 and torch.equal(gradients[0], gradients[3])
        assert averaging.message_bits() == 3 * 64
    elif arm == "qsgd":
        assert float((gradients[0] - mean).abs().max()) < float(before.abs().max()) / 7
        assert averaging.message_bits() == 6 * (32 + 2048)
    else:
        assert torch.equal(gradients, before) and averaging.message_bits() == 0
    averaging.close()


def test_the_study_runs_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: skipped")
    from crossdock.__main__ import main

    small = ["--tasks", "digits", "--epochs", "2", "--seeds", "1", "--workers", "2", "--jobs", "1"]
    assert main(["a2sgd-study", *small, "--json", str(tmp_path), "--plots", str(tmp_path)]) == 0
    assert "| a2sgd |" in capsys.readouterr().out
    assert (tmp_path / "a2sgd_digits.svg").stat().st_size > 1000
    assert main(["a2sgd-study", "--tasks", "digits", "--read", str(tmp_path)]) == 0
    assert main(["a2sgd-study", "--tasks", "sums"]) == 2
