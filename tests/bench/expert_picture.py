"""Draws docs/experts.svg: four ranks, two of which share the experts of a block, and the way of their tokens.

python tests/bench/expert_picture.py
"""

from parallel_pictures import DOCS, box, line, page, text

EP, EXPERTS, RANKS = 2, 8, 4
TOP, HIGH = 92, 84
# of each rank: for which of the two ranks of its group each copy of its tokens is, one for each rank with experts of it
ROWS = ((0, 1, 1, 0, 1, 0), (1, 1, 0, 1, 0, 1), (0, 0, 1, 0, 1, 1), (1, 0, 0, 1, 0, 0))
KINDS = ("f0", "b0")  # of copies for the first rank of a group, and for the second


def middle(rank: int) -> int:
    return TOP + HIGH * rank + 26


def draw_rank(rank: int) -> list[str]:
    """A line of the picture: what a rank keeps, gathers, sends and computes."""
    y, group, place, each = middle(rank) - 26, rank // EP, rank % EP, EXPERTS // EP
    first, half = place * each, "first" if group == 0 else "second"
    drawn = [text(16, y + 30, f"rank {rank}", size=13, bold=True)]
    drawn += [box(76, y, 148, 52, KINDS[place]), text(150, y + 23, f"{half} half of", "i", 11, "middle")]
    drawn += [text(150, y + 39, f"e{first} to e{first + each - 1}", "i", 11, "middle")]
    drawn += [
        box(300, y, 148, 52, KINDS[place]),
        text(374, y + 31, f"e{first} to e{first + each - 1}", "i", 12, "middle"),
    ]
    for number, to in enumerate(ROWS[rank]):
        drawn += [box(530 + 24 * number, y + 14, 20, 24, KINDS[to], 2)]
    received = [sender for sender in range(group * EP, group * EP + EP) for to in ROWS[sender] if to == place]
    for number, sender in enumerate(received):
        drawn += [box(746 + 24 * number, y + 14, 20, 24, KINDS[place], 2)]
        drawn += [text(756 + 24 * number, y + 30, str(sender), "i", 10, "middle")]
    return drawn


def draw() -> list[str]:
    drawn = [text(16, 26, "dp_shard 4, ep 2: one block's experts e0 to e7 under zero3", size=15, bold=True)]
    heads = (
        (150, "kept"),
        (374, "gathered while it runs"),
        (600, "copies of its tokens"),
        (836, "tokens that it computes"),
    )
    drawn += [text(x, 62, said, "d", 13, "middle") for x, said in heads]
    for rank in range(RANKS):
        drawn += draw_rank(rank)
    for rank in range(RANKS):  # a gather is with the rank of the other group that has the other half
        other, y = (rank + EP) % RANKS, middle(rank)
        drawn += [line("dp_shard", (226, middle(other)), (296, y))]
    for rank in range(RANKS):
        for other in range(rank // EP * EP, rank // EP * EP + EP):
            drawn += [line("tp", (678, middle(rank)), (742, middle(other)))]
    y = TOP + HIGH * RANKS + 4
    drawn += [line("dp_shard", (76, y), (106, y)), text(114, y + 4, "edp_shard: gathers of experts, and reductions")]
    drawn += [
        line("tp", (530, y), (560, y)),
        text(568, y + 4, "ep: a token once to each rank of its experts, and a sum back"),
    ]
    return drawn


def main() -> None:
    said = "Four ranks, two of which share the experts of a block, and the way of their tokens"
    (DOCS / "experts.svg").write_text(page(960, TOP + HIGH * RANKS + 24, said, draw()))


if __name__ == "__main__":
    main()
