"""Draws docs/parallel.svg, a mesh of all axes, and docs/pipeline.svg, the timetable that a pipeline's ranks follow.

python tests/bench/parallel_pictures.py
"""

from pathlib import Path

from shardbook.parallel.schedule import Action, actions, bubble, in_flight

DOCS = Path(__file__).parents[2] / "docs"
AXES = {  # of the mesh: size, colour in the light, in the dark
    "pp": (2, "#1a7f37", "#4ac26b"),
    "dp_shard": (2, "#bc4c00", "#e09b5a"),
    "cp": (2, "#8250df", "#c297ff"),
    "tp": (4, "#0969da", "#58a6ff"),
}
RANK = 2  # whose groups and parts are shown
TABLES = (("1f1b", 1), ("interleaved", 2))
RANKS, MICROS = 4, 8
LIGHT = (
    "text{fill:#24292f}.d{fill:#57606a}.n{fill:none;stroke:#d0d7de}.r{fill:#f6f8fa;stroke:#8c959f}.m{fill:#eaeef2;"
    "stroke:#8c959f}.own{fill:#fff1e5;stroke:#bc4c00;stroke-width:2}.f0{fill:#b6e3ff}.f1{fill:#54aeff}.b0{fill:#ffd8b5}"
    ".b1{fill:#e8a05c}.i{fill:#24292f}"
)
DARK = (
    "text{fill:#e6edf3}.d{fill:#9da7b3}.n{stroke:#444c56}.r{fill:#22272e;stroke:#768390}.m{fill:#2d333b;stroke:#768390}"
    ".own{fill:#4d2d12;stroke:#e09b5a}"
)


def page(wide: int, high: int, said: str, drawn: list[str]) -> str:
    light = LIGHT + "".join(
        f".{axis}{{stroke:{c};fill:none;stroke-width:3}}.t{axis}{{fill:{c}}}" for axis, (_, c, _) in AXES.items()
    )
    dark = DARK + "".join(f".{axis}{{stroke:{c}}}.t{axis}{{fill:{c}}}" for axis, (_, _, c) in AXES.items())
    style = f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
    return (
        f'{head} font-family="system-ui, sans-serif" role="img" aria-label="{said}">\n{style}\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def text(
    x: float, y: float, said: str, kind: str = "", size: int = 12, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>{said}</text>'


def box(x: float, y: float, wide: float, high: float, kind: str, round: int = 4) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="{round}"/>'


def line(axis: str, *points: tuple[float, float]) -> str:
    return f'<polyline class="{axis}" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>'


def arrow(axis: str, x: float, y: float, to: float, said: str = "") -> list[str]:
    way = 8 if to > x else -8
    head = line(axis, (to - way, y - 5), (to, y), (to - way, y + 5))
    return [line(axis, (x, y), (to, y)), head, text((x + to) / 2, y - 9, said, f"t{axis}", 11, "middle")]


def place(rank: int) -> tuple[float, float]:
    """The centre of a rank's box: a row is a node."""
    row, column = divmod(rank, 8)
    return 114 + 50 * column + 12 * (column > 3), 80 + 52 * row + 16 * (row > 1)


def along(axis: str) -> list[int]:
    """The group of RANK."""
    inside = 1
    for name, (size, *_) in reversed(AXES.items()):
        if name == axis:
            first = RANK - RANK // inside % size * inside
            return [first + number * inside for number in range(size)]
        inside *= size
    raise AssertionError(axis)


def draw_mesh() -> list[str]:
    named = " x ".join(f"{axis} {size}" for axis, (size, *_) in AXES.items())
    drawn = [text(16, 26, f"mesh: {named}, on four nodes of eight GPUs; the groups of rank {RANK}", size=15, bold=True)]
    for node in range(4):
        _, y = place(8 * node)
        drawn += [text(16, y + 5, f"node {node}", "d", 13), box(82, y - 23, 426, 46, "n", 8)]
    tp, cp, shard, pp = (list(map(place, along(axis))) for axis in ("tp", "cp", "dp_shard", "pp"))
    (x, y), (right, _) = cp
    far = pp[-1][1]
    drawn += [
        line("tp", *tp),
        line("cp", (x, y - 14), (x, y - 30), (right, y - 30), (right, y - 14)),
        line("dp_shard", *shard),
        line(
            "pp",
            (x - 16, y + 14),
            (x - 16, y + 26),
            (x - 34, y + 26),
            (x - 34, far - 26),
            (x - 16, far - 26),
            (x - 16, far - 14),
        ),
    ]
    mates = {rank for axis in AXES for rank in along(axis)}
    for rank in range(32):
        x, y = place(rank)
        kind = "own" if rank == RANK else "m" if rank in mates else "r"
        drawn += [box(x - 22, y - 14, 44, 28, kind), text(x, y + 4, str(rank), anchor="middle")]
    said = {
        "tp": (
            "the same rows; a quarter of each matrix and, between",
            "matrices, of the tokens. All four in every block.",
        ),
        "cp": (
            "the other half of each row, the same part of the model.",
            "Inside attention halves are exchanged for heads.",
        ),
        "dp_shard": (
            "other rows, the same part of the model. The stage",
            "splits it over dp_shard x cp, and gathers it.",
        ),
        "pp": (
            "the same rows, the other blocks. Activations go there,",
            "gradients come back: little, so between nodes.",
        ),
    }
    for number, (axis, lines) in enumerate(said.items()):
        y = 66 + 56 * number
        drawn += [
            line(axis, (532, y - 4), (560, y - 4)),
            text(570, y, f"{axis}: ranks {', '.join(map(str, along(axis)))}", f"t{axis}", 13, bold=True),
        ]
        drawn += [text(570, y + 17 + 16 * at, words, "d") for at, words in enumerate(lines)]
    return drawn


def draw_parts(top: float) -> list[str]:
    """What of the model, and of a step's rows, RANK has."""
    drawn = [text(16, top, f"what rank {RANK} has of the model, and of the rows of a micro-batch", size=15, bold=True)]
    x, y, wide, each = 110, top + 36, 240, 13
    for block in range(8):
        drawn.append(box(x, y + block * each + 6 * (block > 3), wide, each - 2, "m", 2))
    column = along("tp").index(RANK)
    for block in range(4):
        drawn.append(box(x + column * wide / 4, y + block * each, wide / 4, each - 2, "own", 2))
    for part in range(1, 4):
        drawn.append(f'<path class="n" d="M{x + part * wide / 4:g} {y}v{8 * each + 4}"/>')
    drawn += [
        text(x + wide / 2, y - 8, "a matrix: tp", "ttp", 11, "middle"),
        text(x - 8, y + 30, "first blocks", "tpp", 11, "end"),
        text(x - 8, y + 88, "last blocks", "tpp", 11, "end"),
        text(x + wide + 10, y + 20, "a quarter of each,", "d"),
        text(x + wide + 10, y + 36, "in zero3 kept in shards", "d"),
        text(x + wide + 10, y + 52, "by ranks 2, 6, 10, 14", "d"),
    ]
    x, wide = 640, 280
    for number, said in enumerate(("rows of rank 2", "other rows")):
        for row in range(2):
            for half in range(2):
                kind = "own" if (number, half) == (0, 0) else "m"
                drawn.append(box(x + half * (wide / 2 + 2), y + number * 54 + row * 22, wide / 2 - 2, 18, kind, 2))
        drawn.append(
            text(x + wide / 2, y + number * 54 - 6, "its tokens: cp", "tcp", 11, "middle") if not number else ""
        )
        drawn.append(text(x - 8, y + number * 54 + 25, said, "tdp_shard", 11, "end"))
    return [each for each in drawn if each]


def draw_ways(top: float) -> list[str]:
    """Tokens through a block along tp and along cp, and through stages along pp."""
    drawn = [text(16, top, f"the way of tokens; the coloured part is rank {RANK}'s", size=15, bold=True)]

    def tokens(x: float, y: float, part: float, shares: int, said: str, below: str, high: float = 84) -> None:
        drawn.append(box(x, y, 24, high, "m", 2))
        drawn.append(box(x, y + part * high / shares, 24, high / shares, "own", 2))
        drawn.extend(
            [
                text(x + 12, y + high + 16, said, size=11, anchor="middle"),
                text(x + 12, y + high + 30, below, "d", 11, "middle"),
            ]
        )

    def matrix(
        x: float, y: float, wide: float, high: float, part: tuple[float, float, float, float], said: str, below: str
    ) -> None:
        drawn.extend([box(x, y, wide, high, "m", 2), box(x + part[0], y + part[1], part[2], part[3], "own", 2)])
        drawn.extend(
            [
                text(x + wide / 2, y + high + 16, said, size=11, anchor="middle"),
                text(x + wide / 2, y + high + 30, below, "d", 11, "middle"),
            ]
        )

    y = top + 24
    drawn.append(text(16, y + 46, "tp", "ttp", 14, bold=True))
    for number, names in enumerate((("q, k, v", "o", "its heads"), ("gate, up", "down", "its share"))):
        x = 60 + 430 * number
        tokens(x, y, 2, 4, "tokens", "norm")
        drawn.extend(arrow("tp", x + 32, y + 42, x + 108, "gather"))
        drawn.extend([box(x + 116, y, 24, 84, "own", 2), text(x + 128, y + 100, "all", size=11, anchor="middle")])
        matrix(x + 148, y, 58, 84, (0, 42, 58, 21), names[0], names[2])
        matrix(x + 214, y, 84, 58, (42, 0, 21, 58), names[1], "")
        drawn.append(text(x + 256, y + 88, "a summand each", "d", 11, "middle"))
        drawn.extend(arrow("tp", x + 306, y + 42, x + 420, "sum, scatter"))
    tokens(920, y, 2, 4, "tokens", "norm")

    y = top + 164
    drawn.append(text(16, y + 46, "cp", "tcp", 14, bold=True))
    tokens(60, y, 0, 2, "its half", "q, k, v: all heads")
    drawn.extend(arrow("cp", 150, y + 42, 270, "exchange"))
    matrix(290, y, 110, 84, (0, 0, 55, 84), "half of the heads, all tokens", "attention")
    drawn.extend(arrow("cp", 420, y + 42, 540, "exchange"))
    tokens(590, y, 0, 2, "its half", "o, norms, MLP: no traffic")

    y = top + 304
    drawn.append(text(16, y + 46, "pp", "tpp", 14, bold=True))
    for number, (x, said, below) in enumerate(
        ((60, "embedding, first blocks", "node 0, 1"), (560, "last blocks, norm, head, loss", "node 2, 3"))
    ):
        for block in range(4):
            drawn.append(box(x + 62 * block, y + 10, 54, 44, "m" if number else "own", 3))
        drawn.extend(
            [text(x + 120, y + 72, said, size=11, anchor="middle"), text(x + 120, y + 86, below, "d", 11, "middle")]
        )
    drawn.extend(arrow("pp", 318, y + 24, 548, "what is made of its tokens"))
    drawn.extend(arrow("pp", 548, y + 46, 318))
    drawn.append(text(433, y + 62, "their gradients", "tpp", 11, "middle"))
    return drawn


def timetable(schedule: str, chunks: int) -> list[list[tuple[Action, int, int]]]:
    """When each rank does what: a forward of all its layers takes 2 x chunks, a backward 4; links cost nothing."""
    queues = [actions(schedule, rank, RANKS, MICROS, chunks) for rank in range(RANKS)]
    ended: dict[tuple[bool, int, int], int] = {}  # by way, stage of the model, micro-batch
    clock, found = [0] * RANKS, [[] for _ in range(RANKS)]
    last = RANKS * chunks - 1
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                action, stage = queue[0], queue[0].chunk * RANKS + rank
                other = stage - 1 if action.is_forward else stage + 1
                before = None if not 0 <= other <= last else (action.is_forward, other, action.micro)
                if before and before not in ended:
                    break
                begin = max(clock[rank], ended.get(before, 0) if before else 0)
                clock[rank] = begin + (1 if action.is_forward else 2) * 2 // chunks
                ended[action.is_forward, stage, action.micro] = clock[rank]
                found[rank].append((queue.pop(0), begin, clock[rank]))
    return found


def draw_timetables() -> list[str]:
    drawn, top, unit = [], 16, 13
    for schedule, chunks in TABLES:
        table = timetable(schedule, chunks)
        ends = max(end for row in table for *_, end in row)
        held, idle = in_flight(schedule, 0, RANKS, MICROS, chunks), bubble(RANKS, MICROS, chunks)
        named, share = (f"{schedule}, {chunks} chunks", f"1/{chunks} of ") if chunks > 1 else (schedule, "")
        said = f"{named}: waits {idle:.0%} of what it computes; rank 0 holds {held} passes through {share}its layers"
        drawn.append(text(16, top + 10, said, size=14, bold=True))
        for rank, row in enumerate(table):
            y = top + 24 + 30 * rank
            drawn.append(text(16, y + 17, f"rank {rank}", "d", 12))
            drawn.append(box(70, y, ends * unit, 25, "n", 0))
            for action, begin, end in row:
                kind = f"{'f' if action.is_forward else 'b'}{action.chunk}"
                drawn.append(box(70 + begin * unit + 0.5, y, (end - begin) * unit - 1, 25, kind, 2))
                drawn.append(text(70 + (begin + end) * unit / 2, y + 17, str(action.micro), "i", 11, "middle"))
        top += 170
    for number, (kind, said) in enumerate(
        (("f0", "forward"), ("b0", "backward"), ("f1", "forward, second chunk"), ("b1", "backward, second chunk"))
    ):
        x = 70 + 190 * number
        drawn += [box(x, top - 4, 16, 16, kind, 2), text(x + 24, top + 9, said)]
    return drawn


def main() -> None:
    axes = [
        *draw_mesh(),
        '<path class="n" d="M16 300H944"/>',
        *draw_parts(326),
        '<path class="n" d="M16 500H944"/>',
        *draw_ways(526),
    ]
    said = "Thirty-two ranks on four nodes along four axes, what one has, and the way of tokens along tp, cp and pp"
    (DOCS / "parallel.svg").write_text(page(960, 930, said, axes))
    said = f"What {RANKS} ranks do with {MICROS} micro-batches, in 1f1b and interleaved"
    (DOCS / "pipeline.svg").write_text(page(960, 380, said, draw_timetables()))


if __name__ == "__main__":
    main()
