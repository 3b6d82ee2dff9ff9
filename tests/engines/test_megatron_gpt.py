# SPDX-License-Identifier: Apache-2.0
"""How two trainings of Megatron-Core are compared, with planted faults, and the wrong arguments of
gpu_megatron_gpt.py.
"""

from __future__ import annotations

import pytest
import torch

import gpu_megatron_gpt
import megatron_compare as compare

FC1, FC2 = ("decoder.layers.0.mlp.experts.local_experts.{}." + f"linear_fc{number}.weight" for number in (1, 2))
OTHER = "decoder.layers.0.self_attention.linear_proj.weight"


def gradients() -> dict[str, torch.Tensor]:
    """Of four experts, of which the last has no tokens, and of one other parameter."""
    random = torch.Generator().manual_seed(5)
    made = {part.format(expert): torch.randn(8, 8, generator=random) for expert in range(4) for part in (FC1, FC2)}
    made[FC1.format(3)].zero_()
    made[FC2.format(3)].zero_()
    made[OTHER] = torch.randn(8, 8, generator=random)
    return made


def worst(found: dict[str, torch.Tensor]) -> float:
    return max(compare.gradient_errors(found, gradients()).values())


def test_rounded_gradients_are_far_below_the_limit() -> None:
    assert worst(gradients()) == 0
    assert worst({name: part.bfloat16() for name, part in gradients().items()}) < 0.1 * compare.GRADIENT_LIMIT


def test_an_expert_without_tokens_does_not_make_its_error_unbounded() -> None:
    found = gradients()
    found[FC1.format(3)] += 1e-3  # a few tokens, whose routers were between two experts
    assert 0 < worst(found) < 0.1 * compare.GRADIENT_LIMIT


@pytest.mark.parametrize("fault", ["row", "expert", "weight", "number"])
def test_planted_faults_are_far_above_the_limit(fault: str) -> None:
    found = gradients()
    first, second = FC1.format(0), FC1.format(1)
    if fault == "row":
        found[first] = found[first].roll(1, dims=0)
    if fault == "expert":
        found[first], found[second] = found[second], found[first]
    if fault == "weight":
        found[first] = 2 * found[first]
    if fault == "number":
        found[first] = torch.full_like(found[first], torch.nan)
    assert worst(found) > 10 * compare.GRADIENT_LIMIT


def test_gradients_that_are_all_zero_agree() -> None:
    zeros = {name: torch.zeros_like(part) for name, part in gradients().items()}
    assert set(compare.gradient_errors(zeros, zeros).values()) == {0.0}


def test_losses_differ_by_their_worst_step() -> None:
    means, ranks = compare.largest_difference([[2.0, 4.0], [3.0, 3.0]], [[2.0, 4.0], [3.0, 6.0]])
    assert (means, ranks) == (pytest.approx(1 / 3), 0.5)
    assert compare.largest_difference([[float("nan")]], [[1.0]]) == (float("inf"), float("inf"))


@pytest.mark.parametrize(
    ("itself", "flex", "message"),
    [
        (9e-5, 9e-4, ""),
        (9e-5, 2e-3, "flex: 2.0e-03 is above 0.001"),
        (2e-4, 9e-4, "itself: 2.0e-04 is above 1.0e-04, so the others say nothing"),
        (0.0, float("nan"), "flex: nan is above 0.001"),
    ],
)
def test_a_comparison_counts_if_a_run_repeats_itself_far_better(itself: float, flex: float, message: str) -> None:
    assert compare.mismatches({"itself": itself, "flex": flex}, 1e-3) == message


def test_the_table_has_every_column_that_a_row_has() -> None:
    lines = compare.table({"alltoall": {"steps/s": "7.30"}, "flex": {"steps/s": "7.49", "GPU ms": "34.1"}})
    assert [line.split() for line in lines] == [
        ["dispatcher", "steps/s", "GPU", "ms"],
        ["alltoall", "7.30"],
        ["flex", "7.49", "34.1"],
    ]
    assert compare.milliseconds([0.001 * number for number in range(1, 101)]) == (pytest.approx(51), pytest.approx(99))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device cpu", ""),
        ("--device cpu --experts 33", "--experts is 33: it must be a multiple of the number of ranks, which is 2"),
        ("--device cpu --topk 40", "--topk is 40: it must be at most --experts, which is 32"),
        ("--device cpu --hidden 24 --heads 8", "--hidden is 24: it must be a multiple of 2 * --heads, which is 16"),
        ("--device cpu --steps 3", "--steps is 3: at least 4 are needed"),
        ("--device cpu --tolerance 0", "--tolerance is 0.0: it must be above 0"),
        ("--device cpu lossses", "CASE is lossses: it must be one of gradients, losses"),
        ("--device cpu trace", "CASE is trace, which needs --device cuda"),
    ],
)
def test_wrong_arguments_of_a_training_are_named(words: str, message: str) -> None:
    options = gpu_megatron_gpt.parser().parse_args(words.split())
    found = gpu_megatron_gpt.problem(options, num_ranks=2)
    assert found.startswith(message) and bool(found) == bool(message)
