"""What goes wrong while a checkpoint is read or written is called what it is."""

import pytest
import torch
import torch.distributed as dist

from shardbook.boxes import overlap
from shardbook.ranks import exits
from shardbook.ranks.exits import RunFailed, report_error
from shardbook.recipe import RecipeError
from shardbook.run.checkpoint import load
from shardbook.run.checkpoint.format import Damaged, begin, publish, read_stored
from shardbook.run.checkpoint.load import ItemReader, checkpoint_shapes, read_parameters
from shardbook.run.checkpoint.save import _writable, to_item, write_finite

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "none": torch.zeros(0, 4)}
LOST = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2011"
ELSEWHERE = {
    "device memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "device": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "nccl": dist.DistBackendError("NCCL error: unhandled system error"),
    "store": dist.DistStoreError("wait timeout"),
    "peer": RuntimeError(LOST),
    "memory": MemoryError("no room"),
    "host memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
}


@pytest.fixture
def checkpoint(tmp_path):
    state = {
        "step": 2,
        "tokens": 1,
        "loader": {},
        "shapes": {name: [*tensor.shape] for name, tensor in TENSORS.items()},
    }
    side = begin(tmp_path, 2, needed=1)
    items = [to_item(f"model.{name}", tensor) for name, tensor in TENSORS.items()]
    publish(side, 2, state, write_finite(tmp_path, side, 0, items), keep=0, check_held=lambda: None)
    return tmp_path / "step-000002"


def read(path):
    return dict(read_parameters(path, checkpoint_shapes(path)))


def last_line(error, monkeypatch, capsys):
    monkeypatch.setattr(exits.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(exits, "LEAVING", exits.threading.Event())
    report_error(error, exits.FAILED)
    return capsys.readouterr().err.splitlines()[-1]


def test_every_kind_of_tensor_is_read(checkpoint):
    found = read(checkpoint)
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_no_file_is_to_blame_for_is_called_what_it_is(name, checkpoint, monkeypatch, capsys):
    planted = ELSEWHERE[name]

    def read_item(*given):
        raise planted

    monkeypatch.setattr(load, "read_item", read_item)
    with pytest.raises(type(planted)) as met:
        read(checkpoint)
    said = last_line(met.value, monkeypatch, capsys)
    assert met.value is planted and "damaged" not in said and "remove it" not in said
    assert ("another rank ended" if name == "peer" else str(planted)) in said
    with pytest.raises(type(planted)) as met, _writable(checkpoint):
        raise planted
    assert met.value is planted and "cannot be written" not in last_line(met.value, monkeypatch, capsys)


@pytest.mark.parametrize("error", [EOFError("cut"), KeyError("a"), RuntimeError("unexpected pos 64 vs 0")])
def test_what_a_file_is_to_blame_for_stays_so(error, checkpoint, monkeypatch):
    def read_item(*given):
        raise error

    monkeypatch.setattr(load, "read_item", read_item)
    with pytest.raises(Damaged, match=rf"damaged \({type(error).__name__}: "):
        read(checkpoint)


def test_what_no_item_has_is_not_left_as_it_was(checkpoint):
    """A tensor that is absent, one of another shape, and one of which a part is absent or there twice."""
    for name, shape, said in (
        ("c", [1], r"model.c: it has 0 of 1 elements"),
        ("a", [3, 3], r"rank-0.bin: model.a: of shape \[2, 3\], here \[3, 3\]"),
    ):
        with pytest.raises(Damaged, match=rf"damaged \({said}\)"):
            dict(read_parameters(checkpoint, {name: torch.Size(shape)}))
    rows = read_stored(checkpoint).items["rank-0.bin"]
    for items, count in (([rows[0]._replace(sizes=[1, 3])], 3), ([rows[0], rows[0]], 12)):
        with pytest.raises(Damaged, match=rf"model.a: it has {count} of 6 elements"):
            ItemReader(checkpoint, {"rank-0.bin": items}).read({"model.a": torch.empty(2, 3)})


@pytest.mark.parametrize(
    ("boxes", "is_whole"),
    [  # of a tensor of 2 x 3, each of offsets and sizes
        ([([0, 0], [2, 2]), ([0, 1], [2, 1])], False),  # the second column twice, the third in none
        ([([0, 0], [1, 3]), ([0, 0], [1, 3])], False),
        ([([0, 0], [2, 2]), ([0, 2], [2, 1])], True),
        ([([0, 0], [1, 2]), ([0, 2], [2, 1]), ([1, 0], [1, 2])], True),
    ],
)
def test_parts_that_overlap_are_no_whole_tensor(checkpoint, boxes, is_whole):
    """Although they have as many elements as the tensor."""
    row = read_stored(checkpoint).items["rank-0.bin"][0]
    items = [row._replace(offsets=offsets, sizes=sizes) for offsets, sizes in boxes]
    reader = ItemReader(checkpoint, {"rank-0.bin": items})
    assert sum(overlap(row, item).numel for item in items) == 6
    if is_whole:
        assert len(reader._find("model.a", torch.empty(2, 3))) == len(boxes)
        return
    words = r"damaged \(model.a: some of its 6 elements are there twice, others are not\)"
    with pytest.raises(Damaged, match=words):
        reader.read({"model.a": torch.empty(2, 3)})


@pytest.mark.parametrize(
    "error, raised, said",
    [
        (ELSEWHERE["device memory"], torch.OutOfMemoryError, "CUDA out of memory"),
        (RunFailed("another has it"), RunFailed, "^another has it"),
        (RecipeError("refused"), RecipeError, "^refused"),
        (OSError(28, "No space left on device"), RunFailed, r"cannot be written \(OSError: .*No space"),
    ],
)
def test_a_writer_that_fails(error, raised, said, tmp_path):
    with pytest.raises(raised, match=said), _writable(tmp_path / "step-000001"):
        raise error
