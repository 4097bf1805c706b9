"""Packed micro-batches of made-up documents."""

from shardbook.data.loader import Batching, build_micro_batch


def many_documents(dice, rows, length, most=40, multiple=128):
    """A packed micro-batch of documents of 3 to 200 tokens."""
    encoded, layout = [], []
    for _ in range(rows):
        row, room = [], length - dice.randint(0, 40)
        while room > 3 and len(row) < most:
            size = min(dice.randint(3, 200), room)
            row.append(len(encoded))
            encoded.append({"input_ids": [dice.randrange(259) for _ in range(size)], "mask": [True] * size})
            room -= size
        layout.append(tuple(row))
    return build_micro_batch(encoded, layout, Batching(length, rows, 0, 1, documents=most, multiple=multiple))
