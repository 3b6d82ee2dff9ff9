# SPDX-License-Identifier: Apache-2.0
"""Calls in any order, with right and wrong arguments, on open and closed objects: nothing but exceptions.

One rank has nobody to wait for. A crash takes the process with it, so every seed runs in one of its own.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

import crossdock as ep

NUM_CALLS = 3000
ALLOWED = (ep.Error, TypeError, ValueError, OverflowError, BufferError)


class Monkey:
    """Objects of all kinds, and calls on them that are chosen by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.comms: list[Any] = []
        self.groups: list[Any] = []
        self.handles: list[Any] = []
        self.windows: list[Any] = []

    def pick(self, objects: list[Any]) -> Any:
        return self.random.choice(objects) if objects else None

    def array(self) -> Any:
        """Most are of a size that some call wants."""
        memory: Any = ep.Memory(4096)
        shape = self.random.choice([(2, 4), (2, 8, 4), (1, 4, 4), (8, 4), (2, 1), (2, 2), (2,), (1,), (0, 4), (8, 1)])
        dtype = self.random.choice([np.float32] * 4 + [np.int64] * 2 + [np.int32, np.float16, np.uint8])
        choices: list[Any] = [np.zeros(shape, dtype)] * 8
        choices += [None, "text", 7, np.zeros(shape, dtype)[..., ::2], np.zeros(shape, dtype).T, memory]
        choices += [ep.Tensor(np.zeros(shape, dtype))]
        if window := self.pick(self.windows):
            choices += [window, window]
        return self.random.choice(choices)

    def small(self) -> Any:
        return self.random.choice([0, 1, 1, 2, 2, 3, 4, 8, -1, 2**31, 2**40, None, "many", True])

    def info(self) -> Any:
        fields = ["expert_counters", "src_rank_counters", "expert_offsets", "recv_total_counter"]
        chosen = self.random.sample(fields, self.random.randint(0, 2))
        return self.random.choice([None, ep.LayoutInfo(**{name: self.array() for name in chosen}), 3])

    def make_group(self) -> None:
        fields: dict[str, Any] = {
            "algorithm": self.random.choice(list(ep.Algorithm)),
            "num_experts": 2,
            "max_dispatch_tokens_per_rank": 4,
            "max_token_bytes": 16,
        }
        others = ["num_topk", "max_recv_tokens_per_rank", "enable_mask", "ht_masks", "zero_copy", "lsa_team_size"]
        fields[self.random.choice(others)] = self.small()
        if self.random.random() < 0.2:
            fields[self.random.choice(list(fields))] = self.small()
        self.groups.append(ep.Group(self.pick(self.comms), **fields))

    def make_handle(self) -> None:
        group, layout = self.pick(self.groups), self.random.choice(list(ep.Layout))
        if self.random.random() < 0.5:
            self.handles.append(group.create_handle(layout, self.array(), layout_info=self.info()))
        else:
            memory = self.random.choice([None, self.array()])
            self.handles.append(group.init_handle(layout, self.small(), handle_mem=memory))

    def make_window(self) -> None:
        memory: Any = ep.Memory(4096)
        window = self.pick(self.comms).register_window(memory)
        self.windows.append(window)
        array = np.frombuffer(memory, np.float32).reshape(-1, 4)[: self.random.choice([2, 8])]
        self.windows.append(ep.Tensor(array, window=window, window_offset=self.random.choice([0, 0, 16, 4096, 2**50])))

    def dispatch(self) -> None:
        inputs = ep.DispatchInputs(tokens=self.array(), topk_weights=self.random.choice([None, self.array()]))
        outputs = ep.DispatchOutputs(tokens=self.array(), topk_weights=self.random.choice([None, self.array()]))
        kinds: list[dict[str, Any]] = [{}, {}, {"send_only": True}, {"pass_direction": ep.PassDir.BWD}, {"scales": 1}]
        fields = self.random.choice(kinds)
        self.pick(self.handles).dispatch(inputs, outputs, layout_info=self.info(), **fields)

    def combine(self) -> None:
        outputs = ep.CombineOutputs(tokens=self.array(), topk_weights=self.random.choice([None, self.array()]))
        self.pick(self.handles).combine(self.array(), outputs, **self.random.choice([{}, {"send_only": True}]))

    def forget(self) -> None:
        objects = self.random.choice([self.groups, self.handles, self.windows])
        if objects:
            objects.pop(self.random.randrange(len(objects)))

    def call(self) -> None:
        calls: list[tuple[int, Any]] = [
            (1, lambda: self.comms.extend(ep.Communicator.create_threads(1))),
            (1, lambda: self.pick(self.comms).close()),
            (4, self.make_group),
            (2, lambda: self.pick(self.groups).close()),
            (12, self.make_handle),
            (2, lambda: self.pick(self.handles).close()),
            (2, self.make_window),
            (1, lambda: self.pick(self.windows).close()),
            (20, lambda: self.pick(self.handles).update(self.array(), layout_info=self.info())),
            (20, self.dispatch),
            (20, self.combine),
            (5, lambda: self.pick(self.handles).complete()),
            (1, lambda: self.pick(self.handles).set_sums(self.random.choice([*ep.Sums, 3]))),
            (1, lambda: self.pick(self.handles).dropped_tokens(self.array())),
            (1, lambda: self.pick(self.groups).mask_query()),
            (1, lambda: self.pick(self.groups).mask_update([self.small()])),
            (1, lambda: self.pick(self.groups).mask_clean()),
            (1, lambda: self.pick(self.groups).traffic()),
            (1, lambda: self.pick(self.groups).handle_mem_size(self.random.choice(list(ep.Layout)), self.small())),
            (3, self.forget),
            (1, gc.collect),
        ]
        self.random.choices([call for _, call in calls], [weight for weight, _ in calls])[0]()


def run(seed: int) -> None:
    monkey, done = Monkey(seed), 0
    for _ in range(NUM_CALLS):
        try:
            monkey.call()
            done += 1
        except ALLOWED:
            pass
        except AttributeError as error:  # there was no object to call
            assert "NoneType" in str(error) or "'Tensor' object" in str(error), error
    print(done)


@pytest.mark.parametrize("seed", range(4))
def test_calls_in_any_order(seed: int) -> None:
    program = f"import test_any_order; test_any_order.run({seed})"
    found = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=__file__.rpartition("/")[0],
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > NUM_CALLS // 20  # some were right


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(int(sys.argv[1]))
