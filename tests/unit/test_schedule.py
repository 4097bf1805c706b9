"""The table of a pipeline's actions: complete, in order, without deadlock, as full and as idle as the formulas."""

from itertools import product

import pytest

from shardbook.parallel.schedule import Action, actions, bubble, in_flight

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
