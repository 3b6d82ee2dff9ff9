#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the paths of one row: docs/row_ll.svg (low latency) and docs/row_ht.svg (high throughput).

row_paths.py            writes both pictures
row_paths.py --check    fails if a picture is not what this writes, or if a file lacks a function named for it
"""

import itertools
import pathlib
import sys
from html import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent

WIDTH = 940
COLUMN = 415  # width of a station
LEFT = {"source": 16, "target": WIDTH - 16 - COLUMN}
GAP = 22  # between stations
LINE = 17
STYLE = """
svg { font-family: Helvetica, Arial, sans-serif; font-size: 13px; }
.page { fill: #ffffff; } text { fill: #1f2933; } .rank { font-size: 15px; font-weight: bold; }
.title { font-weight: bold; } .file { font-family: DejaVu Sans Mono, Menlo, monospace; font-size: 11px; fill: #1d5a8a; }
.note { fill: #52606d; } .code { fill: #eef3f8; stroke: #7a869a; } .tensor { fill: #e4f0e6; stroke: #5f8a68; }
.memory { fill: #f6f1e7; stroke: #b9a77c; } .expert { fill: #ffffff; stroke: #7a869a; stroke-dasharray: 4 3; }
.arrow { fill: none; stroke: #31688e; stroke-width: 2; } .head { fill: #31688e; }
@media (prefers-color-scheme: dark) {
.page { fill: #14181d; } text { fill: #e6e9ed; } .file { fill: #8fc4f0; } .note { fill: #a9b4c0; }
.code { fill: #1f2a36; stroke: #6b7a8c; } .tensor { fill: #1d3324; stroke: #5f8a68; }
.memory { fill: #362f1e; stroke: #8d7c52; } .expert { fill: #14181d; stroke: #6b7a8c; }
.arrow { stroke: #7db3d8; } .head { fill: #7db3d8; }
}
"""


# A station: its side, kind (tensor, memory, code, expert), title, lines of text, and {file: functions or classes}.
# A station with `beside` stands on the same height as the one before it. after: the beginnings of the titles of the
# stations from which arrows lead here, if not only from the one before it.
def station(side, kind, title, text=(), files=None, beside=False, after=()):
    return {
        "side": side,
        "kind": kind,
        "title": title,
        "text": text,
        "files": files or {},
        "beside": beside,
        "after": after,
    }


LL = {
    "name": "row_ll",
    "title": "The path of one low-latency row: dispatch, the expert, combine",
    "source": "source rank: owns the token",
    "target": "target rank: has the expert",
    "stations": [
        station(
            "source",
            "tensor",
            "1. inputs->tokens, row t",
            ["The caller's tensor. The host checks it and", "launches one kernel per dispatch."],
            {"src/core/ll/dispatch.cpp": ["LlHandle::dispatch"], "src/core/ll/plan.cpp": ["plan_ll_dispatch"]},
        ),
        station(
            "source",
            "code",
            "2. the row is loaded into shared memory",
            ["With FP8, it is quantised there."],
            {
                "src/kernels/ll/dispatch_send.h": ["load_batch", "quantise_batch"],
                "src/device/row_stage.h": ["RowStage"],
            },
        ),
        station(
            "source",
            "code",
            "3. the row gets its slot: a count of earlier rows",
            ["One row per rank, even for two experts of it."],
            {"src/kernels/ll/routing_counts.h": ["RoutingCounter"], "src/kernels/ll/token_plans.h": ["TokenPlanner"]},
        ),
        station(
            "source",
            "code",
            "4. header and row are stored into the peer",
            ["Before the first store: wait for the peer's credit."],
            {
                "src/kernels/ll/dispatch_send.h": ["send_ll128"],
                "src/kernels/ll/dispatch_send_plain.h": ["PlainSender"],
                "src/kernels/ll/waits.h": ["wait_credit"],
            },
        ),
        station(
            "target",
            "memory",
            "5. slot (source rank, i) of the arena",
            ["Header, row, and the flag of a plain row."],
            {"src/kernels/ll/geometry.h": ["LlGeometry"], "src/kernels/ll/ll128.h": ["Ll128Row"]},
            beside=True,
        ),
        station(
            "target",
            "code",
            "6. the receiver waits for the counts of all sources",
            ["They give every row's place before rows arrive."],
            {"src/kernels/ll/received_counts.h": ["gather", "place_rows"]},
        ),
        station(
            "target",
            "code",
            "7. it waits for the row and copies it",
            ["It keeps in the handle where the row came from."],
            {
                "src/kernels/ll/dispatch_receive.h": ["receive_ll128"],
                "src/kernels/ll/dispatch_receive_plain.h": ["PlainReceiver"],
                "src/kernels/wait.h": ["wait_until"],
            },
        ),
        station(
            "target",
            "tensor",
            "8. outputs->tokens",
            ["The caller's tensor, by expert or by source rank."],
            {"src/core/ll/dispatch.cpp": ["read_dispatch_tokens"]},
        ),
        station("target", "expert", "the caller runs its experts"),
        station(
            "target",
            "tensor",
            "9. inputs->tokens of the combine",
            ["The experts' rows, in the same places."],
            {"src/core/ll/combine.cpp": ["LlHandle::combine"]},
        ),
        station(
            "target",
            "code",
            "10. rows are listed and stored into the source rank",
            ["Expert-major: one per expert. Rank-major: one per rank."],
            {
                "src/kernels/ll/returns.h": ["ReturnList"],
                "src/kernels/ll/combine_send.h": ["Ll128Returns"],
                "src/kernels/ll/combine_send_plain.h": ["PlainReturns"],
            },
        ),
        station(
            "source",
            "memory",
            "11. cell (token t, j) of the arena",
            ["The bytes that are slots in a dispatch."],
            {"src/kernels/ll/geometry.h": ["LlGeometry"]},
            beside=True,
        ),
        station(
            "source",
            "code",
            "12. a warp waits for the token's cells and sums them",
            ["In fp32, in a fixed order, rounded once."],
            {
                "src/kernels/ll/combine_receive.h": ["sum_ll128_rows", "sum_plain_rows"],
                "src/device/sum_rows.h": ["sum_rows"],
            },
        ),
        station(
            "source",
            "tensor",
            "13. outputs->tokens, row t",
            ["The caller's tensor."],
            {"src/core/ll/combine.cpp": ["LlHandle::combine"]},
        ),
    ],
    # (side, station whose height they stand at, lines)
    "notes": [
        (
            "target",
            "1. ",
            [
                "Each box names the files that do the step, and the",
                "functions or classes in them. Green: the caller's tensors.",
                "Yellow: memory that peers write.",
            ],
        ),
        (
            "target",
            "2. ",
            [
                "The kernel: ll_dispatch, at the end of",
                "src/kernels/ll/dispatch_receive.h. Both halves",
                "of all ranks run at the same time.",
            ],
        ),
        (
            "source",
            "7. ",
            [
                "Rank-major into a window: step 4 writes plain rows into",
                "8 directly. The flag and the header still go to 5.",
            ],
        ),
        (
            "source",
            "8. ",
            [
                "A peer of another LSA team: the row is put from an outbox",
                "into 5 (src/kernels/ll/gin_peers.h, outbox.h).",
            ],
        ),
        ("target", "12. ", ["The kernel: ll_combine, at the end of", "src/kernels/ll/combine_receive.h."]),
    ],
}

HT = {
    "name": "row_ht",
    "title": "The path of one high-throughput row: update, dispatch, the expert, combine",
    "source": "source rank: owns the token",
    "target": "target rank: has the expert",
    "stations": [
        station(
            "source",
            "code",
            "0. the update sends the routing, as bits per token",
            ["ncclEpUpdateHandle, once per routing."],
            {"src/core/ht/handle.cpp": ["HtHandle::update"], "src/kernels/ht/update.h": ["announce_chunk"]},
        ),
        station(
            "target",
            "code",
            "0. masks per chunk of 32 tokens, numbers of rows",
            ["Both ranks then know every row's place."],
            {"src/kernels/ht/update.h": ["receive_chunk", "send_bases"]},
            beside=True,
        ),
        station(
            "source",
            "tensor",
            "1. inputs->tokens, row t",
            ["The caller's tensor. The host checks it and", "launches one kernel per dispatch."],
            {"src/core/ht/dispatch.cpp": ["HtHandle::dispatch"], "src/core/ht/plan.cpp": ["plan_ht_dispatch"]},
            after=["0. the update"],
        ),
        station(
            "source",
            "code",
            "2. a sending warp loads the row into shared memory",
            ["Block b of each rank moves the tokens of channel b."],
            {"src/kernels/ht/dispatch_send.h": ["RowSender"], "src/device/row_stage.h": ["RowStage"]},
        ),
        station(
            "source",
            "code",
            "3. it waits for a free slot and stores the row",
            ["Packet p goes into slot p modulo the ring's slots."],
            {"src/kernels/ht/dispatch_send.h": ["target_of"], "src/kernels/ht/rings.h": ["wait_credit"]},
        ),
        station(
            "target",
            "memory",
            "4. a slot of the ring from that source rank",
            ["Part of the arena. Row and scales, no header."],
            {"src/kernels/ht/geometry.h": ["HtGeometry"], "src/kernels/ht/rings.h": ["LsaRing"]},
            beside=True,
        ),
        station(
            "source",
            "code",
            "5. the flag is raised when the row has landed",
            ["On GPUs by one warp per block, the announcer."],
            {"src/kernels/ht/flags.h": ["PendingFlag", "announce_packets"]},
            after=["3. "],
        ),
        station(
            "target",
            "code",
            "6. a receiving warp copies the row, returns the credit",
            ["The masks say which token's row comes next."],
            {"src/kernels/ht/dispatch_receive.h": ["RowReceiver"], "src/kernels/ht/row_batches.h": ["RowBatches"]},
            beside=True,
            after=["4. ", "5. "],
        ),
        station(
            "target",
            "tensor",
            "7. outputs->tokens",
            ["The caller's tensor: flat, or by expert."],
            {"src/core/ht/dispatch.cpp": ["HtHandle::dispatch"]},
        ),
        station("target", "expert", "the caller runs its experts"),
        station(
            "target",
            "tensor",
            "8. inputs->tokens of the combine",
            ["One row per expert, or one per token (flat)."],
            {"src/core/ht/combine.cpp": ["HtHandle::combine"]},
        ),
        station(
            "target",
            "code",
            "9. one row per token returns",
            ["Expert-major: a pipeline of warps sums it first."],
            {
                "src/kernels/ht/combine_send.h": ["RowReturner", "SumReturner"],
                "src/kernels/ht/sum_pipeline.h": ["SumPipeline"],
            },
        ),
        station(
            "source",
            "memory",
            "10. a slot of the ring from that target rank",
            ["Flags and credits as in the dispatch."],
            {"src/kernels/ht/rings.h": ["LsaRing"], "src/kernels/ht/flags.h": ["PendingFlag"]},
            beside=True,
        ),
        station(
            "source",
            "code",
            "11. a warp sums the token's rows, one per rank",
            ["In fp32, in the order of ranks, rounded once."],
            {
                "src/kernels/ht/combine.h": ["sum_token"],
                "src/kernels/ht/combine_rows.h": ["find_lsa_row"],
                "src/device/sum_rows.h": ["sum_rows"],
            },
        ),
        station(
            "source",
            "tensor",
            "12. outputs->tokens, row t",
            ["The caller's tensor."],
            {"src/core/ht/combine.cpp": ["HtHandle::combine"]},
        ),
    ],
    "notes": [
        (
            "target",
            "1. ",
            [
                "The kernels: ht_update, ht_dispatch, ht_combine,",
                "in update.h, dispatch.h and combine.h of",
                "src/kernels/ht. Each warp has one role.",
            ],
        ),
        (
            "target",
            "2. ",
            [
                "Flat tensors in windows: step 3 writes into 7 directly,",
                "and step 11 reads 8 in place. No ring is used.",
            ],
        ),
        (
            "source",
            "7. ",
            [
                "A rank of another LSA team: the row crosses once, to",
                "a rail peer that forwards it, and one row returns",
                "(dispatch_cross.h, combine_cross.h, GinRing).",
            ],
        ),
        ("source", "8. ", ["In a dispatch, a token's row for its own rank", "skips the ring."]),
    ],
}


def height_of(s):
    lines = 1 + len(s["text"]) + sum(len(lines_of(file, names)) for file, names in s["files"].items())
    return lines * LINE + 12


def lines_of(file, names):
    """The file and what to look for in it, in at most COLUMN pixels per line."""
    line = f"{file}: {', '.join(names)}"
    return [line] if len(line) <= 59 else [f"{file}:", f"    {', '.join(names)}"]


def place(stations):
    """Adds to each station its top and height. Those that stand beside each other are equally high."""
    y = 48
    for index, s in enumerate(stations):
        s["height"] = height_of(s)
        if s["beside"]:
            other = stations[index - 1]
            s["y"] = other["y"]
            s["height"] = other["height"] = max(s["height"], other["height"])
        else:
            s["y"] = y
        y = s["y"] + s["height"] + GAP
    return y


def text(x, y, words, kind):
    spaced = words.replace("    ", "\u00a0" * 4)
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(spaced, quote=False)}</text>'


def arrow(points):
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    return f'<path d="{path}" class="arrow" marker-end="url(#head)"/>'


def draw(picture):
    stations = picture["stations"]
    bottom = place(stations)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" width="{WIDTH}" height="{bottom}" '
        'role="img">',
        f"<title>{escape(picture['title'], quote=False)}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L10 5L0 10z" class="head"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{bottom}" class="page"/>',
    ]
    out += [text(LEFT[side], 28, picture[side], "rank") for side in LEFT]
    for s in stations:
        x, y = LEFT[s["side"]], s["y"]
        out.append(f'<rect x="{x}" y="{y}" width="{COLUMN}" height="{s["height"]}" rx="5" class="{s["kind"]}"/>')
        lines = [(s["title"], "title")] + [(line, "note") for line in s["text"]]
        lines += [(line, "file") for file, names in s["files"].items() for line in lines_of(file, names)]
        out += [text(x + 10, y + 18 + LINE * i, *line) for i, line in enumerate(lines)]
    for before, later in itertools.pairwise(stations):
        earlier = [s for s in stations if s["title"].startswith(tuple(later["after"]))] if later["after"] else [before]
        out += [arrow(way(s, later)) for s in earlier]
    for side, beside, lines in picture["notes"]:
        y = next(s["y"] for s in stations if s["title"].startswith(beside))
        out += [text(LEFT[side] + 10, y + 18 + LINE * i, line, "note") for i, line in enumerate(lines)]
    return "\n".join(out + ["</svg>", ""])


def way(earlier, later):
    """Straight down within a column, or straight across to the other one."""
    if earlier["side"] == later["side"]:
        middle = LEFT[earlier["side"]] + COLUMN / 2
        return [(middle, earlier["y"] + earlier["height"]), (middle, later["y"] - 2)]
    edges = [LEFT["source"] + COLUMN, LEFT["target"]]
    y = earlier["y"] + earlier["height"] / 2
    return [(edges[0], y), (edges[1] - 2, y)] if later["side"] == "target" else [(edges[1], y), (edges[0] + 2, y)]


def missing(picture):
    """What a station names and its file lacks."""
    for s in picture["stations"]:
        for file, names in s["files"].items():
            source = ROOT / file
            content = source.read_text() if source.is_file() else ""
            for name in names:
                if name not in content:
                    yield f"docs/row_paths.py: {file} has no {name}"


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    wrong = []
    for picture in (LL, HT):
        path, drawn = ROOT / "docs" / f"{picture['name']}.svg", draw(picture)
        wrong += missing(picture)
        if sys.argv[1:] != ["--check"]:
            path.write_text(drawn)
        elif path.read_text() != drawn:
            wrong.append(f"{path.relative_to(ROOT)} is not what docs/row_paths.py draws: run it")
    sys.exit("\n".join(wrong) or None)


main()
