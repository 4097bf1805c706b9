"""What goes wrong while a checkpoint is read or written is called what it is."""

from traceback import StackSummary

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from shardbook.ranks import exits
from shardbook.ranks.exits import RunFailed, report_error
from shardbook.recipe import RecipeError
from shardbook.run.checkpoint import _writable, checkpoint_shapes, read_parameters
from shardbook.run.item_storage import ItemWriter
from shardbook.run.stored_items import begin, publish

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


def of_rank_1(error):
    """As DCP reports it where rank 0 met something of its own."""
    nothing = StackSummary()
    return CheckpointException("load", {0: (EOFError("cut"), nothing), 1: (error, nothing)})


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "step-000002"
    state = {
        "step": 2,
        "tokens": 1,
        "loader": {},
        "shapes": {name: [*tensor.shape] for name, tensor in TENSORS.items()},
    }

    def finish(side, written):
        publish(side, 2, state, written, keep=0, check_held=lambda: None)

    writer = ItemWriter(path, 0, lambda: begin(tmp_path, 2, needed=1), finish)
    state_dict_saver.save({"model": TENSORS}, storage_writer=writer, planner=DefaultSavePlanner(), no_dist=True)
    return path


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


@pytest.mark.parametrize("wrap", [lambda error: error, of_rank_1], ids=["here", "rank 1"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_no_file_is_to_blame_for_is_called_what_it_is(name, wrap, checkpoint, monkeypatch, capsys):
    planted = ELSEWHERE[name]

    def load(*given, **more):
        raise wrap(planted)

    monkeypatch.setattr(state_dict_loader, "load", load)
    with pytest.raises(type(planted)) as met:
        read(checkpoint)
    said = last_line(met.value, monkeypatch, capsys)
    assert met.value is planted and "damaged" not in said and "remove it" not in said
    assert ("another rank ended" if name == "peer" else str(planted)) in said
    with pytest.raises(type(planted)) as met, _writable(checkpoint):
        raise wrap(planted)
    assert met.value is planted and "cannot be written" not in last_line(met.value, monkeypatch, capsys)


@pytest.mark.parametrize("error", [EOFError("cut"), KeyError("a"), RuntimeError("unexpected pos 64 vs 0")])
def test_what_a_file_is_to_blame_for_stays_so(error, checkpoint, monkeypatch):
    def load(*given, **more):
        raise CheckpointException("load", {0: (error, StackSummary())})

    monkeypatch.setattr(state_dict_loader, "load", load)
    with pytest.raises(RecipeError, match=rf"damaged \({type(error).__name__}: "):
        read(checkpoint)


@pytest.mark.parametrize(
    "error, raised, said",
    [
        (ELSEWHERE["device memory"], torch.OutOfMemoryError, "CUDA out of memory"),
        (
            OSError(28, "No space left on device"),
            RunFailed,
            r"cannot be written \(OSError: .*No space",
        ),
    ],
)
def test_a_writer_that_fails_inside_dcp(error, raised, said, tmp_path, monkeypatch):
    def write_data(*given):
        raise error

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    with pytest.raises(raised, match=said), _writable(tmp_path / "step-000001"):
        state_dict_saver.save({"model": TENSORS}, checkpoint_id=tmp_path / "step-000001", no_dist=True)
