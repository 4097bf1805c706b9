"""The table of a pipeline's actions: complete, in order, without deadlock, as full and as idle as the formulas."""

from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardbook.parallel.pipeline import PipelineLinks
from shardbook.parallel.schedule import Action, Pipeline, actions, bubble, in_flight
from shardbook.parallel.step import MicroBatchRunner, run_forward, run_step

PLAIN = [
    (schedule, ranks, micros, 1)
    for schedule, ranks, micros in product(("gpipe", "1f1b"), (2, 3, 4, 8), (1, 2, 4, 8, 12))
]
LOOPED = [
    ("interleaved", ranks, ranks * groups, chunks) for ranks, groups, chunks in product((2, 3, 4, 8), (1, 2, 3), (2, 3))
]


def tables(schedule, ranks, micros, chunks):
    return [actions(schedule, rank, ranks, micros, chunks) for rank in range(ranks)]


def needs(action, rank, ranks, chunks):
    """What must be done before: (rank, action), or nothing."""
    stage, last = action.chunk * ranks + rank, ranks * chunks - 1
    if action.is_forward:
        other = stage - 1
        return (other % ranks, Action(True, other // ranks, action.micro)) if other >= 0 else None
    other = stage + 1
    return (other % ranks, Action(False, other // ranks, action.micro)) if other <= last else None


@pytest.mark.parametrize("shape", [*PLAIN, *LOOPED], ids=str)
def test_everything_runs_once_forward_before_backward_and_in_order(shape):
    schedule, ranks, micros, chunks = shape
    for rank, table in enumerate(tables(*shape)):
        assert sorted(map(str, table)) == sorted(
            str(Action(way, chunk, micro))
            for way in (True, False)
            for chunk in range(chunks)
            for micro in range(micros)
        )
        for chunk in range(chunks):
            for way in (True, False):
                order = [a.micro for a in table if a.chunk == chunk and a.is_forward is way]
                assert order == list(range(micros))  # so gradients add up alike in every schedule
        held = most = 0
        for action in table:
            if not action.is_forward:
                assert table.index(Action(True, action.chunk, action.micro)) < table.index(action)
            held += 1 if action.is_forward else -1
            most = max(most, held)
        assert held == 0 and most == in_flight(schedule, rank, ranks, micros, chunks)


@pytest.mark.parametrize("shape", [*PLAIN, *LOOPED], ids=str)
def test_the_bubble_is_that_of_the_formula(shape):
    """A forward takes 1, a backward 2, a link nothing."""
    _, ranks, micros, chunks = shape
    waiting, ended, clock = tables(*shape), {}, [0] * ranks
    while any(waiting):
        moved = False
        for rank, table in enumerate(waiting):
            while table:
                before = needs(table[0], rank, ranks, chunks)
                if before is not None and before not in ended:
                    break
                action, moved = table.pop(0), True
                clock[rank] = max(clock[rank], ended.get(before, 0)) + (1 if action.is_forward else 2)
                ended[rank, action] = clock[rank]
        assert moved, "deadlock"
    computing = 3 * micros * chunks
    assert max(clock) / computing - 1 == pytest.approx(bubble(ranks, micros, chunks))


def messages(table, rank, ranks, chunks, groups):
    """What a rank asks of its links, in order: (group, other rank, what, whether it sends)."""
    last = ranks * chunks - 1
    for action in table:
        stage, kind = action.chunk * ranks + rank, "activations" if action.is_forward else "gradients"
        source, target = (stage - 1, stage + 1) if action.is_forward else (stage + 1, stage - 1)
        for other, to, sends in ((source, stage, False), (target, target, True)):
            if 0 <= other <= last:
                link = min(stage, other) % ranks  # of the two ranks, by the first
                group = {"one": (), "kinds": (kind,), "links": (kind, link)}[groups]
                yield group, other % ranks, (kind, to, action.micro), sends


def gets_stuck(shape, groups):
    """Whether ranks wait for each other for ever where a message passes only when both ask for it, and what a rank asks
    of a group is done in order, one thing after another: so NCCL may do it, where gloo would keep what was sent. A rank
    waits for what it receives."""
    _, ranks, _, chunks = shape
    asked = [list(messages(table, rank, ranks, chunks, groups)) for rank, table in enumerate(tables(*shape))]
    queues = [{} for _ in range(ranks)]
    blocked = [False] * ranks
    while True:
        moved = False
        for rank in range(ranks):
            while asked[rank] and not blocked[rank]:
                group, *message = asked[rank].pop(0)
                queues[rank].setdefault(group, []).append(tuple(message))
                blocked[rank], moved = not message[-1], True
        for rank in range(ranks):
            for group, queue in queues[rank].items():
                if not (queue and queue[0][2]):
                    continue
                other, what, _ = queue[0]
                if queues[other].get(group, [])[:1] == [(rank, what, False)]:
                    queue.pop(0)
                    queues[other][group].pop(0)
                    blocked[other], moved = False, True
        if not moved:
            return any(asked) or any(queue for each in queues for queue in each.values())


@pytest.mark.parametrize("shape", [*PLAIN, *LOOPED], ids=str)
def test_groups_of_each_link_and_kind_never_deadlock(shape):
    """Two for the whole pipeline, one for activations and one for gradients, do but for interleaved, a ring."""
    assert not gets_stuck(shape, "links")
    assert gets_stuck(shape, "kinds") == (shape[0] == "interleaved")


def test_one_group_would_deadlock():
    assert [gets_stuck(shape, "one") for shape in PLAIN if shape[0] == "1f1b" and shape[2] > 1] == [True] * 16


def test_a_rank_alone_runs_todays_loop():
    for schedule in ("gpipe", "1f1b", "interleaved"):
        assert list(map(str, actions(schedule, 0, 1, 3))) == ["F0", "B0", "F1", "B1", "F2", "B2"]


def test_1f1b_as_the_paper_draws_it():
    found = [" ".join(map(str, actions("1f1b", rank, 3, 4))) for rank in range(3)]
    assert found == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


class Sent:
    """What was sent, or asked for; it is there at once, whatever it is."""

    def is_completed(self):
        return False

    def wait(self):
        return True


class Chunk:
    """Layers that only say when they are run."""

    def __init__(self, events):
        self.events, self.model = events, self
        self.weight = torch.ones(1, requires_grad=True)

    def __call__(self, *seen, hidden=None):
        self.events.append(("launch",))
        return self.weight.expand(1, 1, 1) * (1.0 if hidden is None else hidden)

    def micro_batch(self, is_last):
        self.events.append(("launch",))
        return nullcontext()


MICRO = SimpleNamespace(input_ids=torch.zeros(1, 1), inputs=(), to=lambda device: MICRO)


def part_of(shape, rank, stream=None):
    """What run_step is given on one rank of a pipeline, and the list of what that asks of the rank's device."""
    schedule, ranks, _, chunks = shape
    place, events = Pipeline(schedule, rank, ranks, (1,) * (ranks * chunks)), []
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    # a link is named by the place of its first rank, and what passes it
    to = {True: (after, ("activations", rank)), False: (before, ("gradients", before))}
    by = {True: (before, ("activations", before)), False: (after, ("gradients", rank))}
    links = PipelineLinks(place, 1, 1, torch.float32, None, None, to, by, stream)
    layout = SimpleNamespace(pipeline=place)
    parts = [Chunk(events) for _ in range(chunks)]
    around = {"begin_step": lambda: None, "end_step": links.finish, "expert_load": None}
    return SimpleNamespace(links=links, layout=layout, chunks=parts, **around), events


def asked_by(monkeypatch, shape, rank, evaluates=False):
    """What the runner asks of the device of `rank`, in order: ("launch",), ("send", link) or ("receive", link)."""
    sharded, events = part_of(shape, rank)
    monkeypatch.setattr(dist, "isend", lambda tensor, other, link: events.append(("send", link)) or Sent())
    monkeypatch.setattr(dist, "irecv", lambda tensor, other, link: events.append(("receive", link)) or Sent())

    def loss_function(model, micro):
        return model().view(1)

    if evaluates:
        for _ in range(shape[2]):
            run_forward(sharded, MICRO, loss_function, torch.device("cpu"))
    else:
        terms = run_step(sharded, [MICRO] * shape[2], loss_function, torch.device("cpu"))
        assert len(terms) == shape[2] * shape[3]
    return events


def stuck(asked, sends_wait=False, connects=False):
    """How much of what each rank asks is never done, where whatever is launched may wait until its device is idle.

    A device is idle when what was launched is done, what was asked for has come and, if `sends_wait`, what was sent has
    been asked for by the other rank, as NCCL has it with what is larger than its buffers. Each link passes in order.
    `connects`: no message passed it before, and in its first one each rank waits for the other to come there.
    """
    ends = {"send": {}, "receive": {}}
    for rank, events in asked.items():
        for number, (kind, *link) in enumerate(events):
            if link:
                ends[kind].setdefault(link[0], []).append((rank, number))
    assert {link: len(each) for link, each in ends["send"].items()} == {
        link: len(each) for link, each in ends["receive"].items()
    }, "what is sent is asked for"
    other = {}
    for link, sent in ends["send"].items():
        for pair in zip(sent, ends["receive"][link], strict=True):
            other |= {pair[0]: pair[1], pair[1]: pair[0]}
    needs = {}
    for rank, events in asked.items():
        busy = set()
        for number, (kind, *_) in enumerate(events):
            needs[rank, number] = {(rank, number - 1)} if number else set()
            if kind == "launch":
                needs[rank, number] |= busy
                busy = set()
            elif kind == "receive" or sends_wait:
                busy.add(other[rank, number])
    for link in ends["send"] if connects else ():
        pair = ends["send"][link][0], ends["receive"][link][0]
        for here, (rank, number) in (pair, pair[::-1]):
            needs[here] |= {(rank, number - 1)} if number else set()
    waits_for, ready = {}, [event for event, before in needs.items() if not before]
    for event, before in needs.items():
        for each in before:
            waits_for.setdefault(each, []).append(event)
    for done in ready:
        for event in waits_for.get(done, ()):
            needs[event].discard(done)
            ready += [event] * (not needs[event])
    return len(needs) - len(ready)


def asks_before(monkeypatch):
    """Planted bug: the next message is asked for before the work is launched that it may be waiting for."""
    make, post = MicroBatchRunner.make_recv_buffer, MicroBatchRunner.post_recv
    monkeypatch.setattr(MicroBatchRunner, "make_recv_buffer", lambda *given: post(given[0], make(*given)))
    monkeypatch.setattr(MicroBatchRunner, "post_recv", lambda passes, asked: asked)


@pytest.mark.parametrize("shape", [*PLAIN, *LOOPED], ids=str)
def test_no_device_waits_for_what_is_not_launched_yet(shape, monkeypatch):
    """In the order in which the runner asks, whatever of it drains the device: a kernel's first use, memory.

    Left: where an interleaved step has several groups of micro-batches, two neighbours that each have a message for the
    other and drain in the same action. Packed rows have one length, so every kernel has been used by then; rows of
    other lengths are refused there.
    """
    ranks = range(shape[1])
    asked = {rank: asked_by(monkeypatch, shape, rank) for rank in ranks}
    assert not stuck(asked) and not stuck(asked, connects=True)
    assert bool(stuck(asked, sends_wait=True)) == (shape[0] == "interleaved" and shape[2] > shape[1])
    assert not stuck({rank: asked_by(monkeypatch, shape, rank, evaluates=True) for rank in ranks}, sends_wait=True)
    asks_before(monkeypatch)
    assert stuck({rank: asked_by(monkeypatch, shape, rank) for rank in ranks})


def test_ranks_that_ask_each_other_first_never_connect():
    asked = {0: [("receive", "a"), ("send", "b")], 1: [("receive", "b"), ("send", "a")]}
    assert not stuck(asked) and stuck(asked, connects=True) == 4


class Allocations(TorchDispatchMode):
    def __init__(self, events):
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("aten::empty"):
            self.events.append(("allocate",))
        return func(*args, **(kwargs or {}))


class Streams:
    """As much of torch.cuda as asking for a message takes: which stream is current, and what waits for what."""

    def __init__(self, monkeypatch, events):
        self.events, self.current = events, "compute"
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self)

    def record_event(self):
        self.events.append(("record", self.current))
        return len(self.events)

    def wait_event(self, event):
        self.events.append(("wait", self.current, self.events[event - 1]))

    def __enter__(self):
        self.current = "aside"

    def __exit__(self, *given):
        self.current = "compute"


def test_a_message_comes_in_while_the_action_before_it_computes(monkeypatch):
    """Memory is taken once and marked as free before the action, on the compute stream; the message waits for that mark
    alone, in another stream, though it is asked for after the action."""
    sharded, events = part_of(("1f1b", 2, 3, 1), 1)
    streams = sharded.links.stream = Streams(monkeypatch, events)
    monkeypatch.setattr(dist, "isend", lambda *given: Sent())
    monkeypatch.setattr(dist, "irecv", lambda *given: events.append(("receive", streams.current)) or Sent())
    with Allocations(events):
        terms = run_step(sharded, [MICRO] * 3, lambda model, micro: model().view(1), torch.device("cpu"))
        assert len(terms) == 3
    room, launch = [("allocate",), ("record", "compute")], ("launch",)
    come = [("wait", "aside", ("record", "compute")), ("receive", "aside")]
    found = [event for event in events if event != ("allocate",) or events[events.index(event) + 1] in room]
    # F0 B0 F1 B1 F2 B2: nothing comes before a backward of the last stage
    assert [*found] == [*room, *come, launch, *room, launch, *come, launch, *room, launch, *come, launch, launch]
