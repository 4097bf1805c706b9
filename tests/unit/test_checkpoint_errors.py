"""What goes wrong while a checkpoint is read or written is called what it is, and one of a stranger runs no code."""

import json
import os
import pickle
from traceback import StackSummary

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from shardbook.ranks import exits
from shardbook.ranks.exits import RunFailed, report_error
from shardbook.recipe import RecipeError
from shardbook.run.checkpoint import _writable, checkpoint_shapes, read_parameters
from shardbook.run.stored_items import MARKER, STATE
from shardbook.run.stored_metadata import Reader

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
    state_dict_saver.save({"model": TENSORS}, checkpoint_id=path, no_dist=True)
    shapes = {name: list(tensor.shape) for name, tensor in TENSORS.items()}
    (path / STATE).write_text(json.dumps({"step": 2, "tokens": 1, "loader": {}, "shapes": shapes}))
    (path / MARKER).touch()
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


class Evil:
    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


def test_a_metadata_that_would_run_code_is_refused(checkpoint, tmp_path):
    file, made = checkpoint / ".metadata", tmp_path / "made"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = Evil(made)  # deep inside of what is well formed
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(RecipeError, match=r"its .metadata asks for posix.mkdir, which is not called"):
        read(checkpoint)
    assert not made.exists()
    pickle.loads(file.read_bytes())
    assert made.exists()  # it would have


def call(name, *words):
    """A pickle that calls what `name` says with `words`."""
    return f"c{name}\n({''.join(words)}tR.".encode()


@pytest.mark.parametrize(
    "content",
    [
        call("posix\nsystem", "Vtrue\n"),
        call("builtins\neval", "V1\n"),
        call("torch\nload", "Vfile\n"),
        call("torch.distributed.checkpoint.metadata\nMetadata.__init__"),
        call("builtins\ngetattr", "ctorch\nSize\n", "V__class__\n"),
    ],
)
def test_nothing_that_is_no_description_is_called(content, checkpoint):
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(RecipeError, match=r"which is not called|damaged"):
        read(checkpoint)


def test_a_member_of_an_enum_may_be_written_as_earlier_pythons_do(checkpoint):
    """Early Pythons 3.11 write a call of getattr; of anything but an enum it gives nothing."""
    name = "torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING"
    (checkpoint / ".metadata").write_bytes(call("builtins\ngetattr", f"c{name}\n", "VTORCH_CHANNELS_LAST\n"))
    assert Reader(checkpoint).read_metadata().name == "TORCH_CHANNELS_LAST"


def test_an_entry_that_is_a_pickle_in_the_place_of_a_tensor(checkpoint, tmp_path):
    file, made = checkpoint / ".metadata", tmp_path / "made"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["model.a"] = BytesStorageMetadata()
    where = next(place for index, place in metadata.storage_data.items() if index.fqn == "model.a")
    torch.save(Evil(made), checkpoint / "evil")
    place = type(where)("evil", 0, (checkpoint / "evil").stat().st_size)
    index = next(index for index in metadata.storage_data if index.fqn == "model.a")
    metadata.storage_data = {key: value for key, value in metadata.storage_data.items() if key != index}
    metadata.storage_data[type(index)("model.a")] = place
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(RecipeError, match=r"model.a is a pickle there, which is not read; must be a tensor"):
        read(checkpoint)
    assert not made.exists()
    box = {"model.a": torch.empty(2, 3)}
    state_dict_loader.load(box, checkpoint_id=checkpoint, no_dist=True)
    assert made.exists()  # DCP by itself would have run it
