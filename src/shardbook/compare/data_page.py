"""A recipe's data as one self-contained page: sources, lengths, and rows with their trained tokens marked.

Invariant: it shows a `Look` and counts nothing itself. No script and no request; light, dark and print by CSS alone.
"""

from html import escape
from pathlib import Path
from string import Template

from shardbook.compare.page import table
from shardbook.data.look import COLUMNS, Look, Piece

HIGH, NAMES, WIDE = 22, 120, 380  # in the histogram: height of a bar and its gap, width for names, full width
COUNTS = 60  # width for counts


def write_data_page(path: Path, title: str, look: Look) -> None:
    """Writes the page of `look`."""
    folder = Path(__file__).parent
    rows = "".join(
        f"<h3>{escape(name)}</h3>"
        + "".join(f"<p>{escape(one.title)}</p><pre>{''.join(map(_token, one.pieces))}</pre>" for one in sequences)
        for name, sequences in look.examples
    )
    page = Template((folder / "data.html").read_text()).substitute(
        css=(folder / "page.css").read_text(),
        title=escape(title),
        about=escape(look.summary),
        sources=table("Documents of an epoch, by source", COLUMNS, [part.cells() for part in look.parts]),
        histogram=_histogram(look),
        rows=rows,
    )
    path.write_text(page)


def _token(piece: Piece) -> str:
    tag = "mark" if piece.trained else "span"
    text = escape(piece.text).replace("\n", "↵\n")
    if text.endswith("\n"):  # the newline goes behind the tag: the mark ends on the token's line
        return f"<{tag}>{text[:-1]}</{tag}>\n"
    return f"<{tag}>{text}</{tag}>"


def _histogram(look: Look) -> str:
    most, bars = max(count for _, _, count in look.bars), []
    for number, (first, last, count) in enumerate(look.bars):
        y, width = number * HIGH, (WIDE - NAMES - COUNTS) * count / most
        middle = f'y="{y + HIGH / 2:g}" dominant-baseline="central"'
        bars.append(
            f'<text x="{NAMES - 10}" {middle} text-anchor="end">{first:,} to {last:,}</text>'
            f'<rect x="{NAMES}" y="{y + 3}" width="{width:.1f}" height="{HIGH - 6}"/>'
            f'<text x="{NAMES + width + 8:.1f}" {middle}>{count:,}</text>'
        )
    size = f'viewBox="0 0 {WIDE} {HIGH * len(look.bars)}" role="img" aria-label="Lengths of sequences in tokens"'
    return f"<svg {size}>{''.join(bars)}</svg>"
