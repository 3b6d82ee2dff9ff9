# SPDX-License-Identifier: Apache-2.0
"""Compares new measurements with the committed ones of the same machine: python3 -m tools.results compare FOLDER
[PERCENT]. FOLDER has ep_bench's documents, NAME-MACHINE.json, as tools/bench_gpu.sh writes them. Fails, and names each
case, if one is more than PERCENT (10) slower, if a case is missing, or if nothing is known of the machine.

The device's time is compared where there is one: it hardly depends on the host.
"""

import sys

from . import data


def fresh_runs(folder):
    """The runs of a folder's documents, by machine and name."""
    runs = {}
    for path, document, is_deep_ep in data.documents(folder):
        if is_deep_ep:
            sys.exit(f"{path}: of deep_ep_bench.py, expected: of ep_bench")
        name, machine = path.stem.rsplit("-", 1)
        head, *lines = data.run_lines(name, document, date="today", commit="here")
        run = runs.setdefault(machine, {})[name] = data.Run(head)
        for line in lines:
            run.add(line)
    return runs


def compare_runs(name, stored, fresh, percent):
    """How many cases were compared, and what is wrong, in sentences."""
    compared, wrong = 0, []
    for case in stored.cases:
        now = next((each for each in fresh.cases if each.settings == case.settings), None)
        for operation in data.OPERATIONS:
            before = case.row(operation)
            if before is None:
                continue
            compared += 1
            what = f"{name}, {case.settings.get('tokens')} tokens, {operation}"
            row = now and now.row(operation)
            if row is None:
                wrong.append(f"{what}: not measured")
            elif row.compared > before.compared * (1 + percent / 100):
                wrong.append(f"{what}: {row.compared:.2f} us, {before.compared:.2f} at {stored.commit}")
    return compared, wrong


def main(arguments):
    if not 1 <= len(arguments) <= 2:
        sys.exit(__doc__)
    percent = float(arguments[1]) if len(arguments) == 2 else 10.0
    compared, wrong = 0, []
    fresh = fresh_runs(arguments[0])
    if not fresh:
        sys.exit(f"there are no documents NAME-MACHINE.json in {arguments[0]}")
    for machine, runs in fresh.items():
        if machine not in data.machines():
            sys.exit(
                f"there are no figures of {machine}, only of {', '.join(data.machines())}: "
                "./dev tables --take FOLDER stores new ones"
            )
        stored = data.load(machine)
        for name, run in runs.items():
            if name not in stored:
                print(f"{name} on {machine}: nothing to compare with")
                continue
            count, sentences = compare_runs(name, stored[name], run, percent)
            compared += count
            wrong += sentences
    print(f"compared {compared} cases, allowed {percent:g} % slower: {len(wrong)} wrong")
    if wrong:
        sys.exit("\n".join(wrong))
