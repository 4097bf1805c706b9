"""Puts a CUDA that remembers (streams.py) in torch's place: devices, copies, factories, threads, collectives.

What asks torch gets it: fully_shard, DTensor, autograd's hooks, transformers, DCP. torch.compile leaves functions as
they are, varlen_attn is a plain one, and where NCCL would be gloo carries the messages.
"""

import contextlib
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from streams import CPU, IN_PLACE, Event, Machine, Party, Stream, Tracker, fill_storage, joined, outside
from torch.distributed.tensor import DTensor
from varlen import plain_varlen_attn

DEVICES = 8
FACTORIES = [
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "linspace",
    "eye",
    "rand",
    "randn",
    "randint",
    "randperm",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "empty_strided",
    "scalar_tensor",
]
NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


class StandIn(Machine):
    def __init__(self):
        super().__init__()
        self.undo: list = []

    def put(self, owner, name: str, value) -> None:
        own = vars(owner) if isinstance(owner, type) else None
        before = own.get(name, "absent") if own is not None else getattr(owner, name, "absent")
        self.undo.append((owner, name, before))
        setattr(owner, name, value)

    def install(self) -> "StandIn":
        assert not IN_PLACE
        IN_PLACE.append(self)
        self.default = object.__new__(Stream)
        Party.__init__(self.default, "the default stream")
        self.default.device = torch.device("cuda", 0)
        real = torch._C.TensorBase.device
        self.real_device = lambda tensor: real.__get__(tensor)
        self.put_cuda()
        self.put_tensor()
        self.put_factories()
        self.put_threads()
        self.put_collectives()
        self.put_disk()
        self.put(torch, "compile", as_it_is(torch.compile))
        kernel = ModuleType("torch.nn.attention.varlen")
        kernel.__spec__, kernel.varlen_attn = ModuleSpec(kernel.__name__, None), plain_varlen_attn
        sys.modules[kernel.__name__] = kernel
        self.mode = Tracker()
        self.mode.__enter__()
        return self

    def remove(self) -> None:
        self.mode.__exit__(None, None, None)
        for owner, name, before in reversed(self.undo):
            if isinstance(before, str) and before == "absent":
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        sys.modules.pop("torch.nn.attention.varlen", None)
        IN_PLACE.clear()

    def put_cuda(self) -> None:
        cuda = torch.cuda
        properties = SimpleNamespace(
            total_memory=80 * 2**30, name="NVIDIA H100", major=8, minor=0, multi_processor_count=1
        )
        for name, value in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "is_current_stream_capturing": lambda: False,  # a build for CUDA asks the driver, which is not there
            "device_count": lambda: DEVICES,
            "current_device": self.current_device,
            "set_device": self.set_device,
            "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
            "get_device_properties": lambda *_: properties,
            "get_device_capability": lambda *_: (8, 0),
            "is_bf16_supported": lambda *_, **__: True,
            "Stream": Stream,
            "Event": Event,
            "current_stream": lambda *_: self.stream(),
            "default_stream": lambda *_: self.default,
            "set_stream": lambda stream: setattr(self.local, "stream", stream),
            "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
            "synchronize": self.synchronize,
            "device": lambda *_: contextlib.nullcontext(),
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister),
            "check_error": check_error,
            "memory_allocated": lambda *_: 0,
            "memory_reserved": lambda *_: 0,
            "max_memory_allocated": lambda *_: 0,
            "max_memory_reserved": lambda *_: 0,
            "memory_stats": lambda *_: {},
            "reset_peak_memory_stats": lambda *_: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda *_: (80 * 2**30, 80 * 2**30),
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda *_: None,
        }.items():
            self.put(cuda, name, value)
        self.put(torch._C._distributed_c10d, "_dump_nccl_trace", lambda *_: b"")
        self.put(cuda.nccl, "version", lambda: (2, 27, 0))
        self.put(torch, "Generator", Generator)
        self.put(torch, "Stream", Stream)
        self.put(torch, "Event", Event)

    def synchronize(self, *_) -> None:
        self.check_thread("synchronize")
        # of lists: other threads add to both meanwhile
        for party in [self.default, *{s for kept in list(self.memory.values()) for s in (kept.stream,) if s}]:
            self.wait_for(party.clock)
        for held in list(self.works.values()):
            if held.of_device:
                self.wait_for(held.clock)

    def register(self, pointer: int, size: int, flags: int) -> int:
        self.check_thread("cudaHostRegister")
        if not pointer or not size:
            return 1
        self.registered[pointer] = size
        return 0

    def unregister(self, pointer: int) -> int:
        return 0 if self.registered.pop(pointer, 0) else 1

    def put_tensor(self) -> None:
        base, tensor = torch._C.TensorBase, torch.Tensor
        self.put(tensor, "device", property(self.device_of))
        self.put(tensor, "is_cuda", property(lambda t: self.device_of(t).type == "cuda"))
        self.put(tensor, "is_cpu", property(lambda t: self.device_of(t).type == "cpu"))
        real_to, tolist, numpy = base.to, base.tolist, base.numpy

        def to(t, *args, **kwargs):
            device, dtype, non_blocking, form = torch._C._nn._parse_to(
                *[a for a in args if not isinstance(a, bool)],
                **{key: value for key, value in kwargs.items() if key != "copy"},
            )
            flags = [a for a in args if isinstance(a, bool)]
            non_blocking, copy = (flags + [non_blocking, kwargs.get("copy", False)][len(flags) :])[:2]
            first = args[0] if args else kwargs.get("other")
            if isinstance(first, torch.Tensor):
                device, dtype = first.device, first.dtype
            more = {"memory_format": form} if form is not None else {}
            device = self.named(device) if device is not None else t.device
            if device.type == "meta" or t.device.type == "meta":
                with self.forcing(device if device.type == "cuda" else None):
                    return real_to(t, CPU if device.type == "cuda" else device, dtype or t.dtype, copy=copy, **more)
            if device == t.device:
                return real_to(t, dtype=dtype or t.dtype, non_blocking=non_blocking, copy=copy, **more)
            with self.forcing(device):
                return real_to(t, dtype=dtype or t.dtype, non_blocking=non_blocking, copy=True, **more)

        def pin_memory(t, *_):
            if t.is_cuda:
                raise RuntimeError("cannot pin a tensor of the device")
            copy = torch.empty_like(t).copy_(t)
            self.of(copy).pinned = True
            return copy

        def looked_at(real):
            def look(t, *args, **kwargs):
                if t.is_cuda:
                    if real is numpy:
                        raise TypeError("can't convert cuda:0 device type tensor to numpy")
                    stream = self.stream()
                    joined(stream.clock, self.host.clock)
                    self.read(t, stream, "tolist")
                    self.wait_for(stream.clock)
                elif t.numel() and not t.is_meta and not isinstance(t, DTensor):
                    self.read(t, self.host, "tolist")
                return real(t, *args, **kwargs)

            return look

        for name, value in {
            "to": to,
            "cpu": lambda t, *_, **__: to(t, CPU),
            "cuda": lambda t, device=None, non_blocking=False: to(t, device or "cuda", non_blocking=non_blocking),
            "pin_memory": pin_memory,
            "is_pinned": lambda t, *_: self.is_pinned(t),
            "record_stream": lambda t, stream: self.of(t).recorded.add(stream),
            "tolist": looked_at(tolist),
            "numpy": looked_at(numpy),
        }.items():
            self.put(tensor, name, value)
        for name in NEW:
            self.put(tensor, name, self.placing(getattr(base, name)))
        real_resize = torch.UntypedStorage.resize_

        def resize_(storage, size):
            kept = self.memory.get(storage._cdata)
            if kept is not None and kept.device != CPU:
                with self.lock:
                    if size < storage.nbytes():
                        self.let_go(kept)
                        fill_storage(storage)
                        kept.freed = not size
                    else:
                        stream = self.stream()
                        joined(stream.clock, self.host.clock)
                        self.take_room(stream, "resize_")
                        kept.stream, kept.write, kept.reads = stream, (stream, stream.ticks), {}
                        kept.recorded, kept.freed = set(), False
            grows = size > storage.nbytes()
            result = real_resize(storage, size)
            if grows:
                fill_storage(storage)
            return result

        self.put(torch.UntypedStorage, "resize_", resize_)
        self.put(tensor, "_make_wrapper_subclass", staticmethod(on_cpu(base._make_wrapper_subclass)))
        real_foreach = torch._foreach_copy_

        def foreach_copy(into, source, *more):
            result = real_foreach(into, source, *more)
            if into and into[0].is_cuda and into[0].dtype == source[0].dtype:
                for one in into:
                    rewrite_nans(one)
            return result

        self.put(torch, "_foreach_copy_", foreach_copy)

    def named(self, device) -> torch.device:
        """`cuda` is the thread's current one."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.current_device())
        return device

    @contextlib.contextmanager
    def forcing(self, device):
        before = getattr(self.local, "forced", None)
        self.local.forced = device
        try:
            yield
        finally:
            self.local.forced = before

    def placing(self, real):
        """A function that makes tensors, where `device=` says."""

        @wraps(real)
        def make(*args, device=None, pin_memory=False, **kwargs):
            device = None if device is None else self.named(device)
            given = {} if device is None else {"device": CPU if device.type == "cuda" else device}
            forced = (
                device if device is not None and device.type in ("cuda", "cpu") else getattr(self.local, "forced", None)
            )
            with self.forcing(forced):
                made = real(*args, **given, **kwargs)
            if pin_memory:
                self.of(made).pinned = True
            return made

        return make

    def put_factories(self) -> None:
        for name in FACTORIES:
            self.put(torch, name, self.placing(getattr(torch, name)))
        pad_sequence = torch._C._nn.pad_sequence

        def padded(sequences, *args, **kwargs):  # makes its result inside, by the options of what it is given
            with self.forcing(sequences[0].device):
                return pad_sequence(sequences, *args, **kwargs)

        self.put(torch._C._nn, "pad_sequence", padded)
        for name in ("tensor", "as_tensor"):  # from the host's values: a copy that blocks
            real = getattr(torch, name)

            def make(data, *args, device=None, real=real, **kwargs):
                if device is None or torch.device(device).type != "cuda":
                    given = {} if device is None else {"device": device}
                    return real(data, *args, **given, **kwargs)
                return real(data, *args, **kwargs).to(device)

            self.put(torch, name, make)

    def put_threads(self) -> None:
        """Each thread is watched; what a future brings is known to who asks for it."""
        run, submit, result = threading.Thread.run, ThreadPoolExecutor.submit, Future.result

        def run_watched(thread):
            if [self] != IN_PLACE:
                return run(thread)
            with Tracker():
                return run(thread)

        def submit_known(pool, function, /, *args, **kwargs):
            if [self] != IN_PLACE:
                return submit(pool, function, *args, **kwargs)
            clock, known = dict(self.host.clock), {}

            def call(*args, **kwargs):
                joined(self.host.clock, clock)
                try:
                    return function(*args, **kwargs)
                finally:
                    known.update(self.host.clock)

            future = submit(pool, call, *args, **kwargs)
            future.known = known
            return future

        def result_known(future, timeout=None):
            try:
                return result(future, timeout)
            finally:
                if [self] == IN_PLACE:
                    joined(self.host.clock, getattr(future, "known", {}))

        self.put(threading.Thread, "run", run_watched)
        self.put(ThreadPoolExecutor, "submit", submit_known)
        self.put(Future, "result", result_known)

    def put_disk(self) -> None:
        """What a file is read into, or written from, no operation of torch touches."""
        from shardbook.memory.direct_io import DirectFile

        def touching(real, touch):
            def transfer(file, buffer, offset):
                self.host.tick()
                touch(buffer, self.host, "the disk")
                real(file, buffer, offset)

            return transfer

        self.put(DirectFile, "read", touching(DirectFile.read, self.write))
        self.put(DirectFile, "write", touching(DirectFile.write, self.read))

    def put_collectives(self) -> None:
        group, nothing = dist.ProcessGroup, lambda args: ()
        both = {"outputs": lambda args: args[0], "inputs": lambda args: args[1]}
        whole = {"outputs": lambda args: args[0], "inputs": lambda args: args[0]}
        for name, which in {
            "allreduce": whole,
            "broadcast": whole,
            "allgather": both,
            "_allgather_base": both,
            "all_gather_single": both,
            "_reduce_scatter_base": both,
            "reduce_scatter_single": both,
            "alltoall_base": both,
            "all_to_all_single": both,
            "send": {"outputs": nothing, "inputs": lambda args: args[0]},
            "recv": {"outputs": lambda args: args[0], "inputs": nothing},
        }.items():
            if hasattr(group, name):
                self.put(group, name, self.collective(name, getattr(group, name), **which))
        self.real_wait = dist.Work.wait
        self.put(dist.Work, "wait", self.waited(self.real_wait))
        real = dist.init_process_group

        def init(backend=None, *args, **options):
            return real("cpu:gloo,cuda:gloo" if "nccl" in (backend or "") else backend, *args, **options)

        self.put(dist, "init_process_group", init)
        destroy = dist.destroy_process_group

        def end(*args):
            self.raise_broken()
            self.ended = True  # what the process gives back now nobody else is given
            destroy(*args)

        self.put(dist, "destroy_process_group", end)


def check_error(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}: invalid argument")


class Generator(torch.Generator):
    """One of the device draws as the host's does."""

    def __new__(cls, device=CPU):
        return cls.__base__(CPU)


def as_it_is(real):
    """torch.compile, which leaves a function as it is: the compiler would see a CPU."""

    @wraps(real)
    def compile(function=None, **_):
        return function if function is not None else (lambda found: found)

    return compile


def on_cpu(real):
    def make(*args, device=None, **kwargs):
        given = {} if device is None else {"device": CPU if torch.device(device).type == "cuda" else device}
        return real(*args, **given, **kwargs)

    return make


def rewrite_nans(tensor) -> None:
    """CUDA's copy of one dtype goes through float, and writes every NaN alike."""
    with torch.no_grad(), outside():
        if tensor.dtype == torch.bfloat16:
            bits = tensor.view(torch.int16)
            bits[((bits & 0x7F80) == 0x7F80) & ((bits & 0x7F) != 0)] = 0x7FFF


def on_cuda(function, *args):
    """`function(*args)` on a rank whose device is such a GPU."""
    here = StandIn().install()
    try:
        result = function(*args)
        here.finish()
        return result
    finally:
        here.remove()
