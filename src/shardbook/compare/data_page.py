"""A recipe's data as one self-contained page: sources, lengths, and rows with their trained tokens marked.

Invariant: it shows a `Preview` and counts nothing itself. No script and no request; light, dark and print by CSS alone.
"""

from pathlib import Path

from markupsafe import Markup

from shardbook.compare.page import Panel, render
from shardbook.data.preview import COLUMNS, Preview


def write_data_page(path: Path, title: str, preview: Preview) -> None:
    """Writes the page of `preview`."""
    sources = [
        (name, dict(zip(COLUMNS[1:], cells, strict=True))) for name, *cells in (p.cells() for p in preview.parts)
    ]
    lengths = [(f"{first:,} to {last:,}", {"sequences": count}) for first, last, count in preview.bars]
    texts = [
        (name, {one.title: [piece[:2] for piece in one.pieces] for one in all_of}) for name, all_of in preview.examples
    ]
    words = "Each token is ended by a thin line. <mark>Trained tokens</mark> are underlined; the others are context."
    panels = [
        Panel("Sources", "", sources, heads=COLUMNS[:1], caption="Documents of an epoch, by source"),
        Panel("Lengths", "Sequences by their tokens, after cutting.", lengths, "counts", heads=("tokens",), form=","),
        Panel("Rows", Markup(words), texts, "tokens"),
    ]
    render(path, title, [preview.summary, *preview.unread], panels)
