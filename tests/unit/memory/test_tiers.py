"""What offload sends between host and device, under a few lines that stand for CUDA and remember who asked what, in
which stream and thread: what is pinned, what waits for what, what is kept until it was read, how much is under way."""

import re
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plans import settings
from tiny import config

from shardbook.memory import host_state
from shardbook.memory.block_inputs import HostInputs
from shardbook.memory.direct_io import PAGE, page_buffer
from shardbook.memory.host_adamw import HostAdamW
from shardbook.memory.host_state import STAGINGS, OffloadedUnit, allocate_units, staging_bytes
from shardbook.memory.tiers import RING, Prefetcher
from shardbook.model.attention import KERNELS
from shardbook.parallel.layout import build_layout
from shardbook.parallel.placement import build_local
from shardbook.ranks.exits import RunFailed
from shardbook.recipe import Optim, Precision, resolve_precision

CUDA = torch.device("cuda", 0)


class Stream:
    """Logs what it is asked. Its events are over at once, or, while `gate` is shut, when that opens."""

    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def record_event(self):
        event = SimpleNamespace(stream=self.name, number=len(self.cuda.log), synchronize=self.cuda.wait)
        self.cuda.log.append(("record", self.name))
        return event

    def wait_event(self, event):
        self.cuda.log.append(("wait", self.name, event.stream, event.number))

    def wait_stream(self, other):
        self.cuda.log.append(("wait", self.name, other.name, len(self.cuda.log)))

    def synchronize(self):
        self.cuda.wait()


class Cuda:
    """In place of torch.cuda: streams by thread, registered pages, which device a thread has set."""

    def __init__(self, monkeypatch):
        self.log, self.pages, self.local, self.devices, self.made = [], {}, threading.local(), {}, 0
        self.gate = threading.Event()
        self.gate.set()
        there = SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: there)
        monkeypatch.setattr(torch.cuda, "check_error", self.check)
        monkeypatch.setattr(torch.cuda, "Stream", self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self.local, "stream", stream))
        monkeypatch.setattr(torch.cuda, "stream", self.inside)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.devices.update({self.thread: device}))
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.log.append(("uses", stream.name))
        )
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))

    @property
    def thread(self):
        return threading.current_thread().name.partition("_")[0]

    def wait(self):
        assert self.thread == "MainThread" or self.thread in self.devices, f"{self.thread} has set no device"
        assert self.gate.wait(20)

    def register(self, pointer, size, flags):
        bad = not pointer or not size or pointer in self.pages
        self.pages[pointer] = size
        return int(bad)

    def unregister(self, pointer):
        assert is_mapped(pointer), "unmapped before it was unregistered"
        return int(self.pages.pop(pointer, None) is None)

    def check(self, code):
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def stream(self):
        self.made += 1
        return Stream(self, f"stream {self.made}")

    def current(self):
        assert self.thread == "MainThread" or self.thread in self.devices, f"{self.thread} has set no device"
        if not hasattr(self.local, "stream"):
            self.local.stream = Stream(self, f"of {self.thread}")
        return self.local.stream

    def inside(self, stream):
        from contextlib import contextmanager

        @contextmanager
        def around():
            before, self.local.stream = self.current(), stream
            yield
            self.local.stream = before

        return around()


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def is_mapped(pointer):
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= pointer < int(end, 16) for begin, end in spans)


def laid_out(tied=True, lora=None, world=4, **tiers):
    recipe = settings(offload={"optimizer": "cpu", **tiers})
    made = config("llama", tied=tied, num_hidden_layers=3)
    adapted = resolve_precision(settings(**({"lora": lora} if lora else {})), "cpu")
    model = build_local(adapted, made, KERNELS["varlen"], None).model
    parts = (recipe.parallel, Precision(params="bf16"), model, model.parts, model.blocks)
    return build_layout(*parts, world, world, recipe.offload)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [None, {"r": 4}])
@pytest.mark.parametrize("params", ["none", "cpu"])
def test_only_what_is_there_is_registered_and_none_stays(cuda, tied, lora, params):
    """A root without parameters, a frozen unit's moments: CUDA refuses to register nothing."""
    layout = laid_out(tied, lora=lora, params=params)
    units = list(allocate_units(layout, layout.units, 0, None, pin=True))
    flats = [flat for unit in units for flat in unit.flats.values()]
    assert sum(cuda.pages.values()) == sum(flat.nbytes for flat in flats)
    assert any(not flat.nbytes for flat in flats)
    view = flats[0][:1]
    del units, flats
    assert [*cuda.pages] == [view.data_ptr()]  # what a view refers to stays
    del view
    assert not cuda.pages


def test_pages_are_private_and_large_ones_huge(cuda):
    buffers = [page_buffer(100), page_buffer(4 * 2**20), page_buffer(4 * 2**20, pin=True)]
    assert [len(buffer) for buffer in buffers] == [100, 4 * 2**20, 4 * 2**20] and not len(page_buffer(0, pin=True))
    for buffer, wanted in zip(
        buffers, ({"hg": False}, {"hg": True, "dc": False}, {"hg": True, "dc": True}), strict=True
    ):
        assert buffer.data_ptr() % PAGE == 0
        flags = flags_of(buffer.data_ptr())
        assert "sh" not in flags and {flag: flag in flags for flag in wanted} == wanted
        buffer.fill_(7)
        assert buffer.sum() == 7 * len(buffer)


def flags_of(pointer):
    """VmFlags of the mapping that has `pointer`: proc(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= pointer < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError


def held(layout, number, pin=False):
    (unit,) = allocate_units(layout, [layout.units[number]], 0, None, pin)
    unit.masters = [torch.nn.Parameter(torch.zeros(1)) for _ in unit.plan.slots]
    return unit


def host_adamw_of(layout, device=CUDA):
    file = SimpleNamespace(read=None, write=None) if layout.offload.optimizer == "nvme" else None
    with pytest.MonkeyPatch.context() as patch:  # a share of cores is asked of all ranks, and there is one process
        patch.setattr(host_state, "threads_here", lambda ranks_here, device_type: 1)
        return HostAdamW(torch.nn.Linear(1, 1), Optim(), [], SimpleNamespace(layout=layout), file, device)


def test_gradients_leave_in_order_are_held_until_they_landed_and_are_bounded(cuda):
    """While nothing lands, each `flat` that came lives, though its maker let go of it; one more waits for the first."""
    layout = laid_out(world=1)
    optimizer, unit = host_adamw_of(layout), held(layout, 1)
    wanted = unit.plan.reduced
    assert cuda.pages[optimizer.stagings[0].buffer.data_ptr()] == staging_bytes(layout)
    cuda.gate.clear()
    cuda.log.clear()
    flats, at = [], len(cuda.log)
    for number in range(STAGINGS):
        flat = torch.full((wanted,), float(number + 1))
        flats.append(weakref.ref(flat))
        optimizer.receive(unit, flat)
        del flat
        leaving = optimizer.d2h_stream.name
        said, at = cuda.log[at:], len(cuda.log)
        assert said[0][:3] == ("wait", leaving, "of MainThread") and said[1:] == [
            ("record", leaving),
            ("uses", "of MainThread"),
        ]
    assert all(flat() is not None for flat in flats)
    last = ThreadPoolExecutor(1, "autograd", lambda: torch.cuda.set_device(CUDA))
    one_more = last.submit(optimizer.receive, unit, torch.full((wanted,), 4.0))
    assert not one_more.done() and unit.micros <= STAGINGS + 1
    with pytest.raises(TimeoutError):
        one_more.result(0.1)
    cuda.gate.set()
    one_more.result(20)
    unit.accumulated.result(20)
    assert all(flat() is None for flat in flats)
    assert (unit.view("gradients", 0) == sum(range(1, STAGINGS + 1)) + 4).all()


def test_a_step_holds_up_no_gradient(cuda):
    """Else a backward would wait for AdamW of the units behind it."""
    layout = laid_out(world=1)
    optimizer, unit = host_adamw_of(layout), held(layout, 1)
    gate = threading.Event()
    stepping = optimizer.worker.submit(gate.wait, 20)
    for number in range(2 * STAGINGS):
        optimizer.receive(unit, torch.full((unit.plan.reduced,), float(number)))
    unit.accumulated.result(20)
    assert not stepping.done()
    gate.set()


@pytest.mark.parametrize("arrivals", [1, STAGINGS, STAGINGS + 1])
def test_what_goes_wrong_in_the_thread_is_raised(cuda, monkeypatch, arrivals):
    """In clip at the latest, also where a later one of the same unit went well."""
    layout = laid_out(world=1)
    optimizer, unit = host_adamw_of(layout), held(layout, 1)
    real, calls = optimizer._accumulate, []

    def fails_once(*work):
        calls.append(work)
        if len(calls) == 1:
            raise RunFailed("planted")
        real(*work)

    monkeypatch.setattr(optimizer, "_accumulate", fails_once)
    with pytest.raises(RunFailed, match="planted"):
        for _ in range(arrivals):
            optimizer.receive(unit, torch.zeros(unit.plan.reduced))
        optimizer.clip(0)


def test_what_the_device_copies_from_is_pinned_and_threads_set_their_device(cuda):
    layout = laid_out(world=1, optimizer="nvme", path="/scratch")
    optimizer = host_adamw_of(layout)
    pinned = [*optimizer.disk.slots, *(staging.buffer for staging in optimizer.stagings)]
    assert len(optimizer.disk.slots) == RING and {one.data_ptr() for one in pinned} == {*cuda.pages}
    prefetcher = Prefetcher(SimpleNamespace(read=lambda into, offset: into.fill_(offset)), PAGE, CUDA)
    assert {one.data_ptr() for one in prefetcher.pages} < {*cuda.pages}
    shards = torch.zeros(PAGE, dtype=torch.uint8)
    assert (prefetcher.fetch(OffloadedUnit(0, None, {"shards": shards}, {"shards": 3})) == 3).all()
    assert {"prefetcher", "gradients", "host-adamw"} <= {*cuda.devices}


def units_of(count, size=PAGE):
    """Units whose shards are away; a byte of each says which it is."""
    shards = [torch.full((size,), number, dtype=torch.uint8) for number in range(count)]
    return [OffloadedUnit(number, None, {"shards": each}, {}) for number, each in enumerate(shards)]


def test_the_next_unit_is_asked_for_before_this_one_is_handed_over(monkeypatch):
    """Forward and backward of four units; the second time nothing is asked for late but the first."""
    prefetcher, units, log = Prefetcher(None, PAGE, torch.device("cpu")), units_of(4), []
    request = prefetcher._request

    def requested(unit, slot):
        log.append(f"asked {unit.number}")
        return request(unit, slot)

    monkeypatch.setattr(prefetcher, "_request", requested)
    walk = [0, 1, 2, 3, 2, 1]
    for number in (*walk, *walk, *walk):
        assert (prefetcher.fetch(units[number]) == number).all()
        log.append(f"given {number}")
    third = log[-2 * len(walk) :]
    assert third[0] == "asked 1" and third == [
        f"{what} {number}"
        for given, ahead in zip(walk, [*walk[1:], 0], strict=True)
        for what, number in (("asked", ahead), ("given", given))
    ]


def test_slots_of_the_device_are_filled_behind_what_reads_them(cuda):
    """Each copy waits for the gather before last, whose slot it takes, each gather for its own copy."""
    prefetcher, units = Prefetcher(None, PAGE, CUDA), units_of(3)
    main, own = (
        torch.cuda.current_stream().name,
        prefetcher.pool.submit(lambda: torch.cuda.current_stream().name).result(),
    )
    for turn in range(12):
        assert (prefetcher.fetch(units[turn % 3]) == turn % 3).all()
        prefetcher.pool.submit(int).result()  # what was asked for ahead is on its way
    waits = [entry for entry in cuda.log if entry[0] == "wait"]
    copies = [entry for entry in waits if entry[1] == own]
    gathers = [entry for entry in waits if entry[1] == main]
    assert len(gathers) == 12 and all(entry[2] == own for entry in gathers)
    assert all(entry[2] == main for entry in copies)
    # each take says when the slot before it is free, and the copy that it asks for waits for that
    records = [number for number, entry in enumerate(cuda.log) if entry == ("record", main)]
    assert [entry[3] for entry in copies[-6:]] == records[-6:]


def test_a_unit_that_was_stepped_is_fetched_anew():
    prefetcher, units = Prefetcher(None, PAGE, torch.device("cpu")), units_of(3)
    fetched, read = [], prefetcher._read
    prefetcher._read = lambda unit, *rest: (fetched.append(unit.number), (read(unit, *rest)[0].clone(), None))[1]
    for number in (0, 1, 2, 0, 1):
        prefetcher.fetch(units[number])
    prefetcher.pool.submit(int).result()
    assert fetched[-1] == 2  # ahead
    stepping = ThreadPoolExecutor(1)
    gate: Future = stepping.submit(threading.Event().wait, 0.1)
    units[2].version += 1
    units[2].ready = stepping.submit(units[2].flats["shards"].fill_, 77)
    assert (prefetcher.fetch(units[2]) == 77).all() and gate.done()


def test_inputs_take_their_own_bytes_and_a_larger_one_takes_over(cuda, monkeypatch):
    inputs = HostInputs([0, 1])
    for rows, is_new in ((3, True), (2, False), (3, False), (5, True)):
        before = inputs.buffers[0].data_ptr() if inputs.buffers else 0
        sent = torch.randn(rows, 1000, 20)
        inputs._send(0, sent)
        assert torch.equal(inputs._load(0, torch.device("cpu"))[0], sent)
        assert (inputs.buffers[0].data_ptr() != before) == is_new
        assert inputs.buffers[0].nbytes == max(rows, 3) * 1000 * 20 * 4
    room = inputs._room(1, SimpleNamespace(nbytes=8000, dtype=torch.float32, shape=(2, 1000), is_cuda=True))
    assert [*cuda.pages.values()] == [8000] and room.shape == (2, 1000)
    del room
    inputs._room(1, SimpleNamespace(nbytes=16000, dtype=torch.float32, shape=(4, 1000), is_cuda=True))
    assert [*cuda.pages.values()] == [16000]  # the smaller one was given back
