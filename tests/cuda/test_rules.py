"""The stand-in for CUDA itself: each rule is red where it is broken, and silent where it is kept."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from cuda_stand_in import StandIn, on_cuda
from streams import RuleBroken
from world import run_world

pytestmark = pytest.mark.slow
CUDA = "cuda"


@pytest.fixture
def cuda():
    here = StandIn().install()
    torch.cuda.set_device(0)
    yield here
    here.remove()


def test_tensors_of_the_device_say_so_and_compute_what_a_cpu_does(cuda):
    host = torch.arange(4.0)
    there = host.to(CUDA)
    assert there.is_cuda and there.device == torch.device("cuda", 0) and not host.is_cuda
    assert (there * 2).is_cuda and there.new_zeros(2).is_cuda and torch.empty_like(there).is_cuda
    assert torch.equal((there * 2).cpu(), host * 2) and not there.cpu().is_cuda
    module = torch.nn.Linear(4, 2, device="meta").to_empty(device=CUDA)
    assert module.weight.is_cuda and module(there).sum().is_cuda
    with pytest.raises(RuleBroken, match="a tensor of the host"):
        there + host


def test_everything_is_put_back():
    before = torch.Tensor.to, torch.empty, torch.cuda.Stream, threading.Thread.run, dist.ProcessGroup.allreduce
    StandIn().install().remove()
    assert before == (
        torch.Tensor.to,
        torch.empty,
        torch.cuda.Stream,
        threading.Thread.run,
        dist.ProcessGroup.allreduce,
    )
    assert not torch.cuda.is_available() and not torch.ones(1).is_cuda


def test_a_stream_waits_for_who_wrote(cuda):
    made, side = torch.ones(4, device=CUDA), torch.cuda.Stream()
    with torch.cuda.stream(side), pytest.raises(RuleBroken, match=r"reads .* never waited"):
        made + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made + 1


def test_an_event_is_known_up_to_where_it_was_recorded(cuda):
    made, side = torch.ones(4, device=CUDA), torch.cuda.Stream()
    event = torch.cuda.current_stream().record_event()
    later = torch.ones(4, device=CUDA)
    side.wait_event(event)
    with torch.cuda.stream(side):
        made + 1
        with pytest.raises(RuleBroken):
            later + 1


def test_nobody_writes_what_another_stream_still_reads(cuda):
    made, side = torch.ones(4, device=CUDA), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made + 1
    with pytest.raises(RuleBroken, match=r"writes .* may still use"):
        made.zero_()
    torch.cuda.current_stream().wait_stream(side)
    made.zero_()


@pytest.mark.parametrize("way", ["", "waits", "records"])
def test_memory_goes_when_all_streams_are_done_or_it_is_recorded_for_them(way, cuda):
    made, side = torch.ones(4, device=CUDA), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = made + 1
    if way == "waits":
        torch.cuda.current_stream().wait_stream(side)
    elif way == "records":
        made.record_stream(side)
    del made
    if way:
        torch.ones(1, device=CUDA)
    else:
        with pytest.raises(
            RuleBroken, match=r"takes memory on the default stream that was freed, .* while stream 1 may still"
        ):
            torch.ones(1, device=CUDA)
    assert kept.is_cuda


def test_a_storage_that_was_emptied_is_not_used_and_comes_back_as_nan(cuda):
    made = torch.ones(4, device=CUDA)
    made.untyped_storage().resize_(0)
    with pytest.raises(RuleBroken, match="was freed"):
        made + 1
    made.untyped_storage().resize_(16)
    assert made.isnan().all().item() and torch.empty(3, device=CUDA).isnan().all().item()


def test_memory_is_taken_on_the_stream_that_uses_it_first(cuda):
    torch.ones(4, device=CUDA)  # which the block below may have been
    room, side = torch.empty(4, device=CUDA), torch.cuda.Stream()
    with torch.cuda.stream(side), pytest.raises(RuleBroken):
        room.zero_()


def test_copies_that_do_not_block_need_pinned_memory_and_are_waited_for(cuda):
    host = torch.ones(4)
    with pytest.raises(RuleBroken, match="not pinned"):
        host.to(CUDA, non_blocking=True)
    there = host.pin_memory().to(CUDA, non_blocking=True)
    back = there.to("cpu", non_blocking=True)  # torch pins what it makes itself
    with pytest.raises(RuleBroken, match="never waited"):
        back + 1
    with pytest.raises(RuleBroken, match="never waited"):
        back.tolist()
    torch.cuda.current_stream().record_event().synchronize()
    assert back.tolist() == [1.0] * 4


def test_a_copy_from_pinned_memory_is_over_before_that_is_written(cuda):
    pinned = torch.ones(4).pin_memory()
    pinned.to(CUDA, non_blocking=True)
    with pytest.raises(RuleBroken, match=r"writes"):
        pinned.zero_()


def test_a_thread_sets_its_device_and_passes_on_what_it_waited_for(cuda):
    there = torch.ones(4, device=CUDA)
    with ThreadPoolExecutor(1) as bare, pytest.raises(RuleBroken, match="set no device"):
        bare.submit(lambda: there + 1).result()
    with ThreadPoolExecutor(1, initializer=lambda: torch.cuda.set_device(0)) as worker:
        back = there.to("cpu", non_blocking=True)
        landed = torch.cuda.current_stream().record_event()
        worker.submit(landed.synchronize).result()
        assert back.sum().item() == 4


def test_no_memory_is_not_registered(cuda):
    from shardbook.memory.direct_io import page_buffer

    assert page_buffer(8192, pin=True).is_pinned() and not page_buffer(8192).is_pinned()
    assert torch.cuda.cudart().cudaHostRegister(0, 0, 0)
    with pytest.raises(RuntimeError, match="invalid argument"):
        torch.cuda.check_error(1)


def test_copies_of_one_dtype_rewrite_what_is_no_number(cuda):
    patterns = torch.tensor([0x7F81, 0x7FC0, 0x3F80, -1], dtype=torch.int16).view(torch.bfloat16).to(CUDA)
    plain, several, bytes_ = (torch.empty_like(patterns) for _ in range(3))
    plain.copy_(patterns)
    torch._foreach_copy_([several], [patterns])
    torch._foreach_copy_([bytes_.view(torch.uint8)], [patterns.view(torch.uint8)])
    assert several.cpu().view(torch.int16).tolist() == [0x7FFF, 0x7FFF, 0x3F80, 0x7FFF]
    assert torch.equal(plain.cpu().view(torch.int16), patterns.cpu().view(torch.int16))
    assert torch.equal(bytes_.cpu().view(torch.int16), patterns.cpu().view(torch.int16))


def test_what_the_host_waits_for_is_counted(cuda):
    there = torch.ones(4, device=CUDA)
    before = cuda.syncs
    there * 2
    assert cuda.syncs == before
    for look in (
        lambda: there.sum().item(),
        there.nonzero,
        there.tolist,
        there.cpu,
        lambda: torch.tensor([1], device=CUDA),
    ):
        before = cuda.syncs
        look()
        assert cuda.syncs > before


# ---- communicators


def sums(way):
    from shardbook.ranks.distributed import start_distributed

    start_distributed()
    assert torch.cuda.current_device() == dist.get_rank()
    tensor = torch.ones(4, device=CUDA)
    work = dist.all_reduce(tensor, async_op=True)
    if way == "waits":
        work.wait()
    return (tensor + 1).tolist()


def test_a_sum_is_waited_for():
    assert run_world(2, on_cuda, sums, "waits") == [[3.0] * 4] * 2
    with pytest.raises(AssertionError, match=r"reads .* which communicator default_pg wrote, and never waited"):
        run_world(2, on_cuda, sums, "")


def pass_round(asks_first, seconds):
    """Two ranks send each other something through a group each; `asks_first`: before they send."""
    import streams

    from shardbook.ranks.distributed import start_distributed

    streams.CONNECT_SECONDS = seconds
    rank, other = start_distributed().rank, 1 - dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    got = torch.empty(3, device=CUDA)
    sent = torch.full((3,), float(rank), device=CUDA)
    if asks_first:
        work = dist.irecv(got, other, groups[other])
    sending = dist.isend(sent, other, groups[rank])
    if not asks_first:
        work = dist.irecv(got, other, groups[other])
    work.wait()
    sending.wait()
    return got.tolist()


def test_a_first_message_waits_for_both_ranks():
    """Each asks first, and both wait for the other to send."""
    with pytest.raises(AssertionError, match=r"waits in its first recv .*: deadlock"):
        run_world(2, on_cuda, pass_round, True, 1.0)


def launch_between(answers):
    """Rank 0 asks for a message and launches what it sends itself; rank 1 sends, or `answers`: when it was sent to."""
    import streams

    from shardbook.ranks.distributed import start_distributed

    streams.CONNECT_SECONDS = 2.0 if answers else streams.CONNECT_SECONDS
    rank, other = start_distributed().rank, 1 - dist.get_rank()
    group, room, sent = dist.new_group([0, 1]), torch.empty(1, device=CUDA), torch.ones(1, device=CUDA)
    if rank == 1 and not answers:
        sending = dist.isend(sent, other, group)
    work = dist.irecv(room, other, group)
    try:
        if rank == 1:
            work.wait()
        if rank == 0 or answers:
            sending = dist.isend(sent * 2, other, group)
        if rank == 0:
            work.wait()
        sending.wait()
    except (RuleBroken, RuntimeError) as error:  # of the other, whose peer is gone
        return str(error)
    return room.tolist()


def test_a_launch_waits_for_what_was_asked_for_before_it():
    assert run_world(2, on_cuda, launch_between, False) == [[1.0], [2.0]]
    assert "a launch waits for a receive" in run_world(2, on_cuda, launch_between, True)[0]
