# SPDX-License-Identifier: Apache-2.0
"""python -m crossdock demo | bench | doctor | plot | run | a2sgd-study: each has --help."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable

from crossdock.cli import a2sgd_study, bench, demo, doctor, plot, run
from crossdock.errors import Error

COMMANDS = {
    "demo": (demo, "run one Mixture-of-Experts layer over ranks of this machine, and check it"),
    "bench": (bench, "time dispatch and combine against the number of tokens, beside memcpy"),
    "doctor": (doctor, "show what this machine has, and what Crossdock would use"),
    "plot": (plot, "draw the JSON of demo or bench"),
    "run": (run, "run an unchanged program that uses nccl_ep.h, nccl.ep, TransformerEngine or DeepEP"),
    "a2sgd-study": (a2sgd_study, "measure what gradient averaging with 64 bits per step costs in accuracy"),
}
OPTIONAL = ("matplotlib", "rich", "sklearn", "torch")  # packages that the commands may miss


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, known, 1)
    return f" Did you mean '{found[0]}'?" if found else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m crossdock", description="Expert-parallel communication.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=module.__doc__))
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        parser.error(f"there is no command '{arguments[0]}'.{_nearest(arguments[0], COMMANDS)} --help lists them")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = commands.choices[options.command]
        guess = _nearest(unknown[0], command._option_string_actions)
        command.error(f"unrecognized arguments: {' '.join(unknown)}.{guess} --help lists the options")
    try:
        outcome: int | Callable[[], int] = COMMANDS[options.command][0].main(options)
    except Error as error:
        print(f"crossdock: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if options.command == "run":
            raise
        print(f"crossdock: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        extra = "study" if options.command == "a2sgd-study" else "tools"
        advice = "" if "pip install" in str(error) else f": pip install 'crossdock[{extra}]'"
        print(f"crossdock: {error}{advice}", file=sys.stderr)
        return 2
    # What run has prepared is the user's program: its errors are its own, and shown whole.
    return outcome() if callable(outcome) else outcome


def run_program() -> int:
    """The command crossdock-run."""
    return main(["run", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
