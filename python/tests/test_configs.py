# SPDX-License-Identifier: Apache-2.0
"""What is given as a configuration and is none is refused with a message; messages quote values whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import crossdock as ep


def group_of(comm: ep.Communicator, *config: Any, **fields: Any) -> ep.Group:
    return ep.Group(comm, *config, num_experts=2, max_dispatch_tokens_per_rank=4, max_token_bytes=64, **fields)


def test_what_is_no_configuration() -> None:
    [comm] = ep.Communicator.create_threads(1)
    wrong: Any
    for wrong, kind in ((8, "int"), ({"num_experts": 2}, "dict"), (ep.DispatchConfig(), "DispatchConfig")):
        with pytest.raises(ep.InvalidArgument, match=f"config is of type {kind}, allowed: GroupConfig, None"):
            group_of(comm, wrong)
    rows, result = np.zeros((2, 4, 4), np.float32), np.zeros((2, 4), np.float32)
    with comm, group_of(comm, None) as group:
        any_config: Any = {}
        with pytest.raises(ep.InvalidArgument, match="config is of type dict, allowed: HandleConfig, None"):
            group.create_handle(ep.Layout.EXPERT_MAJOR, np.zeros((2, 1), np.int64), config=any_config)
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, np.zeros((2, 1), np.int64))
        with pytest.raises(ep.InvalidArgument, match="config is of type dict, allowed: CombineConfig, None"):
            handle.combine(rows, result, config=any_config)
        with pytest.raises(ep.InvalidArgument, match="config is of type CombineConfig, allowed: DispatchConfig, None"):
            handle.dispatch(result, rows, config=ep.CombineConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"max_num_sms": -4}, "max_num_sms is -4, allowed: 0..4294967295"),
        ({"num_topk": 2**32}, "num_topk is 4294967296, allowed: 0..4294967295"),
        ({"timeout_ns": -1}, r"timeout_ns is -1, allowed: 0..2\*\*64-1"),
    ],
)
def test_numbers_that_a_field_cannot_hold(fields: dict[str, int], allowed: str) -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, pytest.raises(ep.InvalidArgument, match=allowed):
        group_of(comm, **fields)
    no_algorithm: Any = 7
    with pytest.raises(TypeError, match="wrong type, int"):
        ep.GroupConfig(algorithm=no_algorithm)


def test_a_long_value_is_cut_between_characters() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm:
        for text in ("x" + "\u00e9" * 60, "xy" + "\u20ac" * 60, "x" + "\U0001f600" * 60):
            with pytest.raises(ep.InvalidArgument, match=f"lsa_team_size is {text[:19]}.*\\.\\.\\., allowed"):
                group_of(comm, lsa_team_size=text)
