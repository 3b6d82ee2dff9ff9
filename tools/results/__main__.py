# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of the committed measurements. Run from the repository's root:

python3 -m tools.results tables [--check | --take FOLDER]   README.md, docs/performance.md and their pictures
python3 -m tools.results compare FOLDER [PERCENT]           new runs of ep_bench with the committed ones
python3 -m tools.results scaling [--check | --measure LL_SCALE]   docs/scaling.md and its picture
python3 -m tools.results timeline FILE [OUT.svg]            what the warps of a kernel did when
python3 -m tools.results slim SVG...                        rewrite matplotlib's SVG files compactly, in place
"""

import importlib
import sys

COMMANDS = ("tables", "compare", "scaling", "timeline", "slim")


def main():
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(__doc__)
        return
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(__doc__)
    command = importlib.import_module(f"tools.results.{sys.argv[1]}")
    if sys.argv[1] != "timeline" and sys.argv[2:] in (["--help"], ["-h"]):  # which has argparse's
        print(command.__doc__)
        return
    command.main(sys.argv[2:])


main()
