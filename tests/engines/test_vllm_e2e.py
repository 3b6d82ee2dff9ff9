# SPDX-License-Identifier: Apache-2.0
"""What vllm_e2e does without vLLM and without a GPU: its lines and groups, the plain loops and the faults that they
find, the limits, the table, and how runs start, take turns and end.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_e2e import control, execute, faults, launch, models, packing, reference, report, runs, traces, weights
from vllm_e2e.__main__ import arguments

# A rank that is ready at once, waits for its turn and ends. Its backend says otherwise: of v2 rank 1 fails, ht never is
# ready, and with graphs it never ends.
STAND_IN = """
import json, os, sys, time
from pathlib import Path
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, rank, line = Path(words["--out"]), int(words["--rank"]), words["--line"]
if "v2" in line:
    sys.exit(3 * rank)
result = {"run": line, "rank": rank, "ready_s": 1.0}
def save():
    (out / f"rank{rank}.new").write_text(json.dumps(result))
    os.replace(out / f"rank{rank}.new", out / f"rank{rank}.json")
if "ht" not in line:
    save()
while not (out / "turn").exists():
    time.sleep(0.01)
result["began"] = time.time()
while "graph" in line:
    time.sleep(1)
result |= {"done": True, "ended": time.time()}
save()
"""
SHAPE = models.Shape(hidden=64, layers=2, experts=8, topk=2, inner=32, heads=2, kv_heads=1)


# ---- how runs start, take turns and end


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> launch.Machine:
    monkeypatch.setattr(launch, "command_of", lambda *words: [sys.executable, "-S", "-c", STAND_IN, *words[3:]])
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    monkeypatch.setattr(launch, "STACKS_S", 0)
    (tmp_path / "work").mkdir()
    return launch.Machine(tmp_path, tmp_path / "work", tmp_path / "logs", 2)


def run_all(machine: launch.Machine, *lines: str, start_s: float = 60, run_s: float = 60) -> dict[str, str]:
    """The word of each."""
    chosen = [runs.parse(line, models.MODELS) for line in lines]
    execute.run_all(chosen, 6, machine, execute.Limits(start_s, run_s, time.monotonic() + 200))
    assert not any(launch.own_processes(machine.logs / one.name) for one in chosen)
    return {one.text: json.loads((machine.logs / one.name / "outcome.json").read_text())["word"] for one in chosen}


def test_runs_of_a_group_start_together_and_take_turns(machine: launch.Machine) -> None:
    lines = ["agrs eager tiny 16", "ll eager tiny 16"]
    assert run_all(machine, *lines) == dict.fromkeys(lines, "ok")
    first, second = (report.load(machine.logs / "-".join(line.split())) for line in lines)
    assert max(one["ended"] for one in first) <= min(one["began"] for one in second)


def test_ranks_share_gpus_where_there_are_fewer(machine: launch.Machine) -> None:
    run, folder = runs.parse("ll eager tiny 16", models.MODELS), machine.logs
    assert control.SHARED_GPUS not in launch.environment(run, machine, folder)
    found = launch.environment(run, dataclasses.replace(machine, gpus=1), folder)
    assert (found[control.SHARED_GPUS], found["NCCL_MULTI_RANK_GPU_ENABLE"]) == ("1", "1")


def test_a_run_that_fails_leaves_the_others_alone(machine: launch.Machine) -> None:
    words = run_all(machine, "v2 eager tiny 16", "agrs eager tiny 16")
    assert words == {"v2 eager tiny 16": "rank 1 failed", "agrs eager tiny 16": "ok"}


def test_a_run_ends_that_never_is_ready(machine: launch.Machine) -> None:
    assert run_all(machine, "ht eager tiny 16", start_s=0.6) == {"ht eager tiny 16": "not ready within 1 s"}


def test_a_run_ends_that_never_comes_to_its_end(machine: launch.Machine) -> None:
    assert run_all(machine, "ll graph tiny 16", run_s=0.6) == {"ll graph tiny 16": "no end within 1 s"}


def test_runs_that_start_by_themselves_are_groups_of_one() -> None:
    lines = [*runs.lines_of("first"), "ll graph small 256 serve", *runs.lines_of("prefill"), *runs.lines_of("deep")]
    groups = runs.groups([runs.parse(line, models.MODELS) for line in lines], 6)
    assert [len(group) for group in groups] == [6, 1, 6, 2]


def test_ports_of_runs_do_not_overlap() -> None:
    taken: set[int] = set()
    first, second = launch.free_ports(taken), launch.free_ports(taken)
    assert not set(first) & set(second)


# ---- lines


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("agrs eager small", "expected: BACKEND MODE MODEL TOKENS"),
        ("deepep eager small 256", "BACKEND is 'deepep', allowed: agrs, ll, ht, v2"),
        ("ll lazy small 256", "MODE is 'lazy', allowed: eager, graph"),
        ("ll eager big 256", "MODEL is 'big', allowed: small, deep, tiny"),
        ("ll eager small 8", "TOKENS is '8', allowed: 16..16384"),
        ("ll eager small 256 chek", "FLAG is 'chek', allowed: check"),
        ("agrs eager small 256 faults", "faults needs a backend of DeepEP"),
        ("ht graph small 256", "MODE graph needs the backend agrs, ll or v2"),
        ("ll eager small 256 kill", "kill needs the flag serve"),
    ],
)
def test_a_wrong_line_names_the_word_and_what_is_allowed(line: str, message: str) -> None:
    with pytest.raises(ValueError, match="--run") as caught:
        runs.parse(line, models.MODELS)
    assert message in str(caught.value)


def test_all_plans_are_right_and_each_run_has_its_own_name() -> None:
    for plan in runs.PLANS:
        names = [runs.parse(line, models.MODELS).name for line in runs.lines_of(plan)]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "words", [["run", "--ranks", "1"], ["run", "--limit", "x"], ["run", "--together", "0"], ["pack"], []]
)
def test_wrong_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        arguments().parse_args(words)


def test_parts_are_as_few_as_first_fit_needs() -> None:
    assert packing.bins({"a": 30, "b": 12, "c": 29, "d": 2}, 45) == [["a", "b", "d"], ["c"]]
    with pytest.raises(ValueError, match="--part-mib"):
        packing.bins({"a": 46 << 20}, 45 << 20)


# ---- layers


def problem(num_tokens: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable[[int], weights.Expert]]:
    """Of layer 1: tokens, their experts and weights, and the experts."""
    made = weights.Weights(SHAPE, is_fp8=False)
    random = torch.Generator().manual_seed(3)
    x = torch.randn(num_tokens, SHAPE.hidden, generator=random).bfloat16()
    ids = torch.rand(num_tokens, SHAPE.experts, generator=random).argsort(1)[:, : SHAPE.topk]
    shares = torch.tensor([0.9, 0.1]).expand(num_tokens, -1)
    return x, ids, shares, lambda number: made.expert(1, number, torch.device("cpu"))


def layer(
    x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, expert: Callable[[int], weights.Expert]
) -> torch.Tensor:
    """Token by token, rounded where engines round."""
    sums = []
    for row, own, its in zip(x, ids.tolist(), shares.tolist(), strict=True):
        total = torch.zeros(SHAPE.hidden)
        for number, share in zip(own, its, strict=True):
            made = expert(number)
            gate, up = (row @ made.w13.T).chunk(2)
            total += share * ((torch.nn.functional.silu(gate) * up) @ made.w2.T).float()
        sums.append(total)
    return torch.stack(sums).bfloat16()


def test_an_honest_layer_is_far_below_the_limit() -> None:
    x, ids, shares, expert = problem()
    expected = reference.moe_layer(x, ids, shares, expert, is_fp8=False)
    found = reference.compare(layer(x, ids, shares, expert), expected, reference.limit_of(is_fp8=False))
    assert found.num_wrong == 0 and found.worst < reference.limit_of(is_fp8=False) / 2


@pytest.mark.parametrize("fault", runs.FAULTS)
def test_a_planted_fault_is_far_above_the_limit_in_its_row_alone(fault: str) -> None:
    x, ids, shares, expert = problem()
    expected = reference.moe_layer(x, ids, shares, expert, is_fp8=False)
    wrong_ids = faults.misrouted(ids, fault, SHAPE.experts, num_ranks=2)
    output = layer(x, wrong_ids, faults.misweighted(shares, fault), expert)
    found = reference.compare(output, expected, reference.limit_of(is_fp8=False))
    assert (found.num_wrong, found.worst_token) == (1, 0)
    assert found.worst > 10 * reference.limit_of(is_fp8=False)


def test_faults_change_what_they_say() -> None:
    _, ids, shares, _ = problem()
    rank, expert = (faults.misrouted(ids, fault, SHAPE.experts, num_ranks=2)[0, 0] // 4 for fault in ("rank", "expert"))
    assert rank != ids[0, 0] // 4 and expert == ids[0, 0] // 4
    assert torch.equal(faults.misrouted(ids, "weight", SHAPE.experts, 2), ids)
    assert faults.misweighted(shares, "weight")[0].tolist() == shares[0].flip(0).tolist()


def test_what_is_not_a_number_is_wrong() -> None:
    output = torch.ones(2, 8)
    output[1, 3] = torch.nan
    found = reference.compare(output, torch.ones(2, 8), 0.1)
    assert (found.num_wrong, found.worst_token, found.worst) == (1, 1, float("inf"))


def test_one_rounding_more_is_as_small_as_one() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    errors = reference.row_errors(reference.rounded_again(x), x.float())
    assert 0.001 < errors.min() and errors.max() < reference.BF16_ROUNDING


def test_what_a_rounding_changes_of_fp8_values_is_within_the_limit() -> None:
    gate, up = torch.randn(2, 256, 768, generator=torch.Generator().manual_seed(1))
    active = (torch.nn.functional.silu(gate) * up).bfloat16()
    torch.manual_seed(1)
    moved = reference.quantised(reference.rounded_again(active))
    errors = reference.row_errors(moved, reference.quantised(active))
    assert reference.FP8_STEPS / 6 < errors.median() and errors.max() < reference.FP8_STEPS


# ---- the table


def result(rank: int, score: float, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "ready_s": 9.0, "done": True, "scores": [-1.0, score], "tokens": [[1, 2]], **more}


def write_run(logs: Path, line: str, results: list[dict[str, Any]], wrong: int = 0, **caught: int) -> None:
    folder = logs / "-".join(line.split())
    folder.mkdir(parents=True)
    (folder / "outcome.json").write_text(json.dumps({"word": "ok"}))
    for one in results:
        (folder / f"rank{one['rank']}.json").write_text(json.dumps(one))
    checked = {"layer": 0, "tokens": 8, "worst": 0.002, "limit": 0.0156, "graph": False}
    lines = [{"fault": "", "wrong": wrong, **checked}]
    lines += [{"fault": fault, "wrong": number, **checked} for fault, number in caught.items()]
    (folder / "check-rank0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


FIRST, SECOND = "agrs eager small 256 check score", "ll eager small 256 check score"


def failures(logs: Path, *lines: str) -> list[list[str]]:
    return [row.failures for row in report.rows_of(logs, lines or (FIRST, SECOND))]


def test_scores_are_judged_by_what_one_rounding_changes(tmp_path: Path) -> None:
    calibrated = {"scores_with": {control.ROUNDING: [-1.0, -2.1]}}
    for name, score in (("near", -2.25), ("far", -2.3)):  # the limit is 2.83 times 0.1
        write_run(tmp_path / name, FIRST, [result(0, -2.0, **calibrated)])
        write_run(tmp_path / name, SECOND, [result(0, score)])
    assert failures(tmp_path / "near") == [[], []]
    [message] = failures(tmp_path / "far")[1]
    assert message.startswith("scores differ from the first run's by 0.1500 on average and up to 0.300")


def test_scores_without_a_calibration_are_shown_but_not_judged(tmp_path: Path) -> None:
    write_run(tmp_path, FIRST, [result(0, -2.0)])
    write_run(tmp_path, SECOND, [result(0, -9.0)])
    assert failures(tmp_path) == [[], []]
    assert "none, not judged" in report.table(report.rows_of(tmp_path, [FIRST, SECOND]))


def test_a_fault_that_scores_do_not_show_fails(tmp_path: Path) -> None:
    line = SECOND + " faults"
    changed = {"rounding": [-1.0, -2.1], "rank": [-1.0, -4.0], "expert": [-1.0, -2.2], "weight": [-1.0, -3.0]}
    write_run(tmp_path, line, [result(0, -2.0, scores_with=changed)], rank=1, expert=1, weight=1)
    [[message]] = failures(tmp_path, line)
    assert "planted fault 'expert'" in message


def test_with_fp8_only_the_layers_must_show_a_fault(tmp_path: Path) -> None:
    line = "v2 eager small 256 fp8 check score faults"
    changed = {"rounding": [-1.0, -2.4], "rank": [-1.0, -3.0], "expert": [-1.0, -3.2], "weight": [-1.0, -4.0]}
    write_run(tmp_path, line, [result(0, -2.0, scores_with=changed)], rank=1, expert=1, weight=1)
    assert failures(tmp_path, line) == [[]]


def test_wrong_rows_missed_faults_and_other_tokens_fail(tmp_path: Path) -> None:
    line = SECOND + " faults"
    write_run(tmp_path, FIRST, [result(0, -2.0)])
    write_run(tmp_path, line, [result(0, -2.0, tokens=[[1, 3]])], wrong=3, rank=1, expert=0)
    assert failures(tmp_path, FIRST, line)[1] == [
        "3 of 8 rows are wrong",
        "the planted fault 'expert' was not found",
        "the planted fault 'weight' was not found",
        "1 of 2 tokens are not the first run's",
    ]


def test_a_score_that_is_not_a_number_differs_without_bound() -> None:
    assert report.difference([[float("nan")]], [[0.0]]).most == float("inf")


def test_the_table_has_columns_for_what_was_measured_alone(tmp_path: Path) -> None:
    decode = {"1": {"tokens_per_s": 50.0, "gap_p50_ms": 20.0, "gap_p99_ms": 22.0, "first_p50_ms": 44.0}}
    write_run(tmp_path, FIRST, [result(0, -2.0, decode=decode), result(1, -2.0, decode=decode)])
    table = report.table(report.rows_of(tmp_path, [FIRST, SECOND]))
    assert "prefill" not in table and "Crossdock's kernels |" not in table
    assert f"{FIRST} | 1                  | 100      | 20.00  | 22.00 | 44" in table
    assert f"FAILED {SECOND}: not run" in table


# ---- traces


def test_a_trace_gives_the_time_of_a_layer_by_part(tmp_path: Path) -> None:
    """Two layers; what is no kernel, and what belongs to no part, does not count."""
    layer = {
        "vllm::moe::topkGating<8>": 3,
        "vllm::moe::moe_align_block_size_kernel": 1,
        "crossdock::crossdock_ll_dispatch<4>": 20,
        "fused_moe_kernel": 60,
        "vllm::act_and_mul_kernel": 5,
        "crossdock::crossdock_ll_combine<2>": 10,
        "vllm::rms_norm_kernel": 2,
    }
    events = [
        {"name": name, "cat": "kernel", "ts": 200 * i, "dur": dur} for i in range(2) for name, dur in layer.items()
    ]
    trace = tmp_path / "rank0.pt.trace.json"
    trace.write_text(json.dumps({"traceEvents": [*events, {"name": "a call", "cat": "cpu_op", "ts": 0, "dur": 900}]}))
    found = traces.summary(trace)
    assert found["layer_us"] == {"routing": 4, "dispatch": 20, "experts": 65, "combine": 10}
    assert "routing 4.0, dispatch 20.0, experts 65.0, combine 10.0" in traces.text(found)
