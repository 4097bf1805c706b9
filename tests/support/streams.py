"""A CUDA that remembers: torch.cuda's streams, events, devices and pinned memory on a CPU, with their rules checked.

Tensors of the device are CPU tensors whose storages are marked; every operation runs at once, so numbers are a CPU's.
What is modelled is the order that a GPU would keep: a stream, a communicator and a thread each have a clock, and know
of the others' clocks what they waited for (vector clocks: Mattern, Virtual time and global states, 1989).

It fails where an operation
- reads what a stream wrote that its own never waited for, or writes what another may still read or write;
- uses memory that was freed, or where memory is freed that another stream may still use and that was not recorded for
  it (torch gives a freed block at once to the stream that it was allocated on);
- copies without blocking from or to host memory that is not pinned, or computes with a host tensor on the device;
- runs in a thread that set no device, or registers no memory;
and it does what a GPU does where that differs from a CPU: copies of one dtype rewrite NaNs, new memory is full of them,
a communicator of two ranks connects at its first message, and a launch waits for every receive that was asked for.

This file has the rules; cuda_stand_in.py puts them in torch's place.
"""

import contextlib
import itertools
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, wraps
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
CONNECT_SECONDS = 20.0  # of a first message, or of a receive that a launch waits for: more is a deadlock
COPIES = {"aten::copy_", "aten::_foreach_copy_", "aten::_to_copy"}
# operations after which the host knows the result, or has to: it waits for the stream
SYNCS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::_unique2",
    "aten::is_nonzero",
    "aten::repeat_interleave",
    "aten::unique_dim",
    "aten::bincount",
}
Clock = dict[int, int]


class RuleBroken(AssertionError):
    """What a GPU would have got wrong, or hung in."""


def joined(clock: Clock, other: Clock) -> None:
    for who, when in other.items():
        if clock.get(who, 0) < when:
            clock[who] = when


class Party:
    """What does one thing after another: a stream, a communicator's own stream, or a thread of the host."""

    numbers = itertools.count(1)

    def __init__(self, name: str):
        self.name, self.number, self.ticks = name, next(Party.numbers), 0
        self.clock: Clock = {self.number: 0}
        self.freed: list[tuple[Party, int, str]] = []  # of memory that was given back to it: who was not done with it

    def tick(self) -> None:
        self.ticks += 1
        self.clock[self.number] = self.ticks


@dataclass
class Memory:
    """What is known of one storage."""

    device: torch.device = CPU
    stream: Party | None = None  # that it was allocated on
    write: tuple[Party, int] | None = None
    reads: dict[Party, int] = field(default_factory=dict)  # since that write, the last of each
    recorded: set[Party] = field(default_factory=set)
    pinned: bool = False
    made: str = ""  # by which operation
    last: str = ""  # which one read it last
    freed: bool = False
    watch: object = None


class Stream(Party):
    def __init__(self, device=None, **_):
        machine().check_thread("a stream is made")
        super().__init__(f"stream {next(machine().streams)}")
        self.device = torch.device(
            "cuda", machine().current_device() if device is None else torch.device(device).index or 0
        )

    def wait_event(self, event) -> None:
        machine().check_thread("wait_event")
        joined(self.clock, event.clock)

    def wait_stream(self, other) -> None:
        joined(self.clock, other.clock)
        joined(self.clock, machine().host.clock)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        machine().check_thread("synchronize")
        machine().wait_for(self.clock)

    def query(self) -> bool:
        return True

    def __enter__(self):
        self.before = machine().stream()
        machine().local.stream = self

    def __exit__(self, *_):
        machine().local.stream = self.before


class Event:
    def __init__(self, *_, **__):
        self.clock, self.at = Clock(), 0.0

    def record(self, stream=None) -> "Event":
        machine().check_thread("an event is recorded")
        stream = stream or machine().stream()
        joined(stream.clock, machine().host.clock)
        self.clock, self.at = dict(stream.clock), time.perf_counter()
        return self

    def wait(self, stream=None) -> None:
        (stream or machine().stream()).wait_event(self)

    def synchronize(self) -> None:
        machine().check_thread("an event is waited for")
        machine().wait_for(self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 1000 * (other.at - self.at)


IN_PLACE: list["Machine"] = []  # at most one


def machine() -> "Machine":
    return IN_PLACE[0]


class Tracker(TorchDispatchMode):
    """Sees every operation, of forward and backward, on plain tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it takes itself apart first
        return machine().run(func, args, kwargs or {})


class Machine:
    def __init__(self):
        self.memory: dict[int, Memory] = {}
        self.streams, self.syncs = itertools.count(1), 0
        self.broken: list[str] = []
        self.local = threading.local()
        self.registered: dict[int, int] = {}  # pointer -> bytes
        self.works: dict[int, SimpleNamespace] = {}
        self.communicators: dict[str, Party] = {}
        self.connected: set[str] = set()
        self.lock = threading.RLock()
        self.ended = False
        self.over: Clock = {}  # what the device has certainly done

    # ---- who runs

    @property
    def host(self) -> Party:
        if not hasattr(self.local, "host"):
            self.local.host = Party(f"thread {threading.current_thread().name}")
        return self.local.host

    def current_device(self) -> int:
        return getattr(self.local, "device", 0)

    def set_device(self, device) -> None:
        self.local.device = device if isinstance(device, int) else torch.device(device).index or 0

    def check_thread(self, what: str) -> None:
        if not hasattr(self.local, "device"):
            name = threading.current_thread().name
            raise RuleBroken(f"{what} in the thread {name}, which set no device: it would open a context on GPU 0")

    def stream(self) -> Stream:
        self.check_thread("the current stream is asked for")
        return getattr(self.local, "stream", None) or self.default

    def wait_for(self, clock: Clock) -> None:
        """The host waits for the device: this thread knows, and for memory it is over whoever knows."""
        joined(self.host.clock, clock)
        joined(self.over, clock)
        self.syncs += 1

    # ---- what lies where

    def of(self, tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.memory:
            kept = self.memory[key] = Memory()
            kept.watch = weakref.ref(storage, lambda _, key=key: self.gone(key))
        return self.memory[key]

    def gone(self, key: int) -> None:
        with self.lock:
            kept = self.memory.pop(key, None)
            if kept is not None and not kept.freed:
                self.let_go(kept)

    def let_go(self, kept: Memory) -> None:
        """Memory goes back to the allocator: who is not done with it? A stream's block is given to whoever allocates
        on that stream next; what is the host's is gone at once."""
        if self.ended or sys.exc_info()[0] is not None:  # nothing is launched any more
            return
        uses = [*kept.reads.items(), *([kept.write] if kept.write else [])]
        for party, when in uses:
            of_device = isinstance(party, Stream) or party in self.communicators.values()  # gloo keeps what it sends
            is_over = self.over.get(party.number, 0) >= when
            if not of_device or is_over or party is kept.stream or party in kept.recorded:
                continue
            if kept.stream is not None:
                kept.stream.freed.append((party, when, kept.made))
            elif not kept.pinned:
                self.broken.append(
                    f"memory of the host, made by {kept.made}, is freed while {party.name} may still use it"
                )

    def take_room(self, stream: Party, name: str) -> None:
        """Memory is allocated on `stream`: its freed blocks are written by what it does next."""
        for party, when, made in stream.freed:
            if stream.clock.get(party.number, 0) < when and self.over.get(party.number, 0) < when:
                stream.freed = []
                took = f"{name} takes memory on {stream.name} that was freed, made by {made}"
                raise RuleBroken(f"{took}, while {party.name} may still use it")
        stream.freed = []

    def is_pinned(self, tensor) -> bool:
        begin = tensor.untyped_storage().data_ptr()
        return self.of(tensor).pinned or any(
            start <= begin < start + size for start, size in list(self.registered.items())
        )

    def device_of(self, tensor) -> torch.device:
        if isinstance(tensor, DTensor):
            return self.device_of(tensor._local_tensor)
        if (real := self.real_device(tensor)) != CPU or type(tensor).__module__.startswith("torchao"):
            return real
        kept = self.memory.get(tensor.untyped_storage()._cdata)
        return kept.device if kept else CPU

    # ---- what an operation does

    def tensors(self, values) -> list:
        return [
            value
            for value in tree_leaves(values)
            if isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
            and self.real_device(value) == CPU
            and value.layout == torch.strided
        ]

    def run(self, func, args, kwargs):
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::wait", "profiler::", "prim::")):
            return func(*args, **kwargs)
        self.raise_broken()
        forced = getattr(self.local, "forced", None)
        inputs = self.tensors((args, kwargs))
        devices = {self.device_of(tensor) for tensor in inputs} - {CPU}
        if forced is None and not devices and not any(isinstance(v, torch.Tensor) for v in tree_leaves((args, kwargs))):
            out = func(*args, **kwargs)  # made on the host
            self.poison(name, out)
            return out
        target = forced if forced is not None else next(iter(devices), CPU)
        of_device = bool(devices) or target.type == "cuda"
        is_copy = name in COPIES
        blocking = not any(a.name == "non_blocking" and v for a, v in self.bound(func, args, kwargs))
        if of_device:
            self.check_thread(name)
            self.drain()
            party = self.stream()
            if not is_copy:
                self.check_mixed(name, inputs)
        else:
            party = self.host
        writes = self.written(func, args, kwargs)
        if is_copy and of_device and not blocking:
            self.check_pinned(name, inputs)
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        joined(party.clock, self.host.clock)
        party.tick()
        if not views or writes:
            for tensor in inputs:
                if not any(tensor is each for each in writes):
                    by_host = of_device and not is_copy and self.device_of(tensor) == CPU  # a number, at the launch
                    self.read(tensor, self.host if by_host else party, name)
            if name == "fsdp::all_gather_copy_in":
                writes = [args[1]]
            for tensor in writes:
                self.write(tensor, party, name)
        before = {tensor.untyped_storage()._cdata for tensor in inputs}
        # a GPU counts whole numbers, a CPU only floats
        whole = name == "aten::histc" and not args[0].is_floating_point()
        out = func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype) if whole else func(*args, **kwargs)
        made = [tensor for tensor in self.tensors(out) if tensor.untyped_storage()._cdata not in before]
        if made and target.type == "cuda":
            self.take_room(party, name)
        for tensor in made:
            kept = self.of(tensor)
            kept.device, kept.made = target, name
            kept.stream = party if target.type == "cuda" else None
            kept.write = (party, party.ticks)
        self.poison(name, out)
        if is_copy and of_device:
            self.crossed(inputs, made, party, blocking)
        sized = any(argument.name == "output_size" and value for argument, value in self.bound(func, args, kwargs))
        if name in SYNCS and of_device and not sized:
            self.wait_for(party.clock)
        if (
            name in ("aten::index", "aten::index_put_")
            and of_device
            and any(
                t is not None and (t.dtype == torch.bool or self.device_of(t) == CPU) for t in args[1] if t is not None
            )
        ):
            self.wait_for(party.clock)
        return out

    def bound(self, func, args, kwargs):
        for argument, value in zip(func._schema.arguments, args, strict=False):
            yield argument, value
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                yield argument, kwargs[argument.name]

    def written(self, func, args, kwargs) -> list:
        return [
            tensor
            for argument, value in self.bound(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in self.tensors(value)
        ]

    def check_mixed(self, name: str, inputs: list) -> None:
        if name.startswith(("aten::index", "aten::_index")):
            return
        on_host = [tensor for tensor in inputs if self.device_of(tensor) == CPU and tensor.dim() and tensor.numel()]
        if on_host:
            raise RuleBroken(f"{name}: a tensor of the host {tuple(on_host[0].shape)} beside tensors of the device")

    def crossed(self, inputs, made, party, blocking) -> None:
        """A copy between host and device, or one that stays on the device."""
        of_host = [t for t in [*inputs, *made] if self.device_of(t) == CPU]
        if not of_host:
            return
        if blocking:
            self.wait_for(party.clock)
            return
        for tensor in made:
            if self.device_of(tensor) == CPU:  # torch pins it itself: ATen/native/TensorConversions.cpp, pin_out
                self.of(tensor).pinned = True

    def check_pinned(self, name: str, inputs: list) -> None:
        for tensor in inputs:
            if self.device_of(tensor) == CPU and tensor.numel() and not self.is_pinned(tensor):
                raise RuleBroken(f"{name}: a copy that does not block, of host memory {tuple(tensor.shape)} not pinned")

    def read(self, tensor, party, name) -> None:
        kept = self.of(tensor)
        self.check_there(tensor, kept, name)
        if kept.write and not self.knows(party, *kept.write):
            writer, _ = kept.write
            raise RuleBroken(
                f"{name} on {party.name} reads {tuple(tensor.shape)} {tensor.dtype}, made by {kept.made}, which "
                f"{writer.name} wrote, and never waited for it"
            )
        kept.reads[party], kept.last = party.ticks, name

    def write(self, tensor, party, name) -> None:
        kept = self.of(tensor)
        self.check_there(tensor, kept, name)
        for other, when in [*kept.reads.items(), *([kept.write] if kept.write else [])]:
            if not self.knows(party, other, when):
                raise RuleBroken(
                    f"{name} on {party.name} writes {tuple(tensor.shape)} {tensor.dtype}, made by {kept.made}, which "
                    f"{other.name} may still use"
                )
        kept.write, kept.reads = (party, party.ticks), {}

    def knows(self, party: Party, other: Party, when: int) -> bool:
        """Threads of the host are not told apart from each other: what they share, locks and queues guard."""
        both_host = other.name.startswith("thread") and party.name.startswith("thread")
        return other is party or both_host or party.clock.get(other.number, 0) >= when

    def check_there(self, tensor, kept: Memory, name: str) -> None:
        if tensor.numel() and (kept.freed or not tensor.untyped_storage().nbytes()):
            raise RuleBroken(f"{name} uses {tuple(tensor.shape)} {tensor.dtype}, made by {kept.made}, which was freed")

    def raise_broken(self) -> None:
        if self.broken:
            said, self.broken = self.broken, []
            raise RuleBroken("; ".join(said[:3]))

    def poison(self, name: str, out) -> None:
        if "empty" in name:
            for tensor in self.tensors(out):
                fill_storage(tensor.untyped_storage())

    # ---- communicators

    def communicator(self, group) -> Party:
        if group.group_name not in self.communicators:
            self.communicators[group.group_name] = Party(f"communicator {group.group_desc or group.group_name}")
        return self.communicators[group.group_name]

    def collective(self, name, real, outputs, inputs):
        @wraps(real)
        def call(group, *args, **kwargs):
            read, written = self.tensors(inputs(args)), self.tensors(outputs(args))
            touched = [*read, *written]
            if any(isinstance(t, torch.Tensor) and self.device_of(t).type == "cuda" for t in touched):
                self.check_thread(name)
                self.connect(name, group, args)
                joined(self.stream().clock, self.host.clock)
                party = self.communicator(group)
                joined(party.clock, self.stream().clock)
            else:  # gloo's own thread
                party = Party(f"communicator of the host ({name})")
                joined(party.clock, self.host.clock)
            party.tick()
            own = {t.untyped_storage()._cdata for t in written}
            for tensor in read:
                if tensor.untyped_storage()._cdata not in own:
                    self.read(tensor, party, name)
            for tensor in written:
                self.write(tensor, party, name)
            with outside():
                work = real(group, *args, **kwargs)
            if work is not None:
                held = SimpleNamespace(clock=dict(party.clock), tensors=touched, party=party, name=name, done=False)
                held.of_device = not party.name.startswith("communicator of the host")
                held.work, held.real_wait = work if name == "recv" else None, self.real_wait
                held.lock = threading.Lock()
                self.works[id(work)] = held
                held.watch = weakref.ref(work, partial(self.drop, id(work)))
            return work

        return call

    def drop(self, key: int, _) -> None:
        self.works.pop(key, None)

    def connect(self, name: str, group, args) -> None:
        """The first message of two ranks: NCCL makes their communicator, and the host waits until both are there."""
        if name not in ("send", "recv") or group.group_name in self.connected:
            return
        self.connected.add(group.group_name)
        store, me, other = (
            distributed_c10d._get_default_store(),
            dist.get_rank(),
            dist.get_global_rank(group, int(args[1])),
        )
        store.set(f"link {group.group_name} {me}", "")
        until = time.monotonic() + CONNECT_SECONDS
        while not store.check([f"link {group.group_name} {other}"]):
            if time.monotonic() > until:
                raise RuleBroken(
                    f"rank {me} waits in its first {name} of {group.group_desc} for rank {other}: deadlock"
                )
            time.sleep(0.002)

    def drain(self) -> None:
        """A launch may wait for the device (a kernel's first load, the allocator's retry), and a receive that was asked
        for before spins there until its message comes."""
        for held in [held for held in list(self.works.values()) if held.work is not None]:
            with held.lock:  # gloo lets one thread alone wait for a receive
                if held.done:
                    continue
                try:
                    with outside():
                        held.real_wait(held.work, timedelta(seconds=CONNECT_SECONDS))
                except RuntimeError as error:
                    raise RuleBroken(
                        f"a launch waits for a receive that was asked for before it: deadlock ({error})"
                    ) from None
                held.done = True

    def waited(self, real):
        @wraps(real)
        def wait(work, *args):
            held, done = self.works.pop(id(work), None), True
            with held.lock if held else contextlib.nullcontext():
                if held is None or not held.done:
                    with outside():  # gloo copies on the host
                        done = real(work, *args)
                if held is not None:
                    held.done = True
            if held is not None:
                joined((self.stream() if held.of_device else self.host).clock, held.clock)
            return done

        return wait

    def finish(self) -> None:
        """What is left to be said."""
        self.raise_broken()


@contextlib.contextmanager
def outside():
    """What the stand-in does itself is seen by nobody."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def fill_storage(storage) -> None:
    """Bytes that are a NaN in every float."""
    if storage.nbytes():
        with torch.no_grad(), outside():
            storage.fill_(255)
