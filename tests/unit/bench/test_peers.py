"""What bench-peers makes of its measurements, on made-up ones: ratios, who is wrong, what is left out, the table."""

import json
import shutil

import peer_report
import peer_work
import peers
import pytest
import torch
from peer_loops import CONTENDERS, Work, sent_bytes
from peer_report import OTHER_ROWS, OURS, PAIRS, compare, judge, rates

LOSSES = [3.0, 2.5, 2.25, 2.0]


def row(seconds: list[float], losses: list[float] = LOSSES, tokens: float = 1000.0) -> dict:
    """Three timed steps; of as many losses as steps there need not be."""
    memory = {"peak_resident_bytes": 2_100_000_000}
    return {"seconds": seconds, "losses": losses, "useful_tokens": [tokens] * len(seconds)} | memory


def measured() -> dict[str, dict]:
    return {
        "ddp": row([50.0, 2.0, 4.0]),
        "bare DDP": row([1.0, 1.0, 6.0]),
        "HF Trainer": {"left_out": "exit code 1: ModuleNotFoundError: No module named 'accelerate'"},
        "packed": row([8.0, 1.0, 3.0], [9.0] * 4, 900.0),
        "padded": row([8.0, 2.0, 2.0], [7.0] * 4, 300.0),
    }


def test_a_ratio_is_of_rounds_and_of_tokens():
    """Not of two medians, 3 and 3.5 seconds; warm-up apart; with as many tokens theirs / ours in seconds."""
    medians, quartiles = compare(judge([measured()]), warmup=1)
    assert medians == {"ddp / bare DDP": 1.0, "packed / padded": pytest.approx(3.0)}  # of 1 / 2 and 6 / 4; of totals
    assert quartiles["ddp / bare DDP"] == [0.75, 1.25]
    assert rates(measured()["ddp"], 1) == [500.0, 250.0]
    medians, quartiles = compare(judge([measured()]), warmup=2)
    assert medians["ddp / bare DDP"] == 1.5 and quartiles["ddp / bare DDP"] == [1.5, 1.5]  # one round has no spread


def test_rounds_of_all_launches_count():
    again = {"ddp": row([1.0] * 3), "bare DDP": row([1.0, 4.0, 4.0])}
    medians, quartiles = compare(judge([measured(), again]), warmup=1)
    assert medians["ddp / bare DDP"] == 2.75 and quartiles["ddp / bare DDP"] == [1.25, 4.0]  # of 0.5, 1.5, 4, 4
    assert medians["packed / padded"] == pytest.approx(3.0)


def test_other_losses_are_wrong_and_have_no_ratio():
    found = measured()
    found["HF Trainer"] = row([0.1, 0.1, 0.1], [3.0, 2.5, 2.25 * 1.0002, 2.0])
    found["zero3"] = row([0.1, 0.1, 0.1], [3.0, 2.5, 2.25, float("nan")])
    found["bare fully_shard"] = found["DeepSpeed ZeRO-3"] = row([2.0, 2.0, 2.0])
    [judged] = judge([found], 1e-4)
    assert judged["HF Trainer"]["wrong"] == "loss of step 3 is 2.250450, the others' 2.250000"
    assert "step 4 is nan" in judged["zero3"]["wrong"]
    assert set(compare([judged], 1)[0]) == {"ddp / bare DDP", "packed / padded"}
    assert judged["ddp"]["largest_difference"] == 0 and "wrong" not in judged["bare DDP"]
    assert "largest_difference" not in judged["packed"]  # other rows
    assert "wrong" not in judge([found], 3e-4)[0]["HF Trainer"]


def test_ours_are_held_to_the_others():
    """However many of ours agree with each other."""
    found = {name: row([1.0] * 3, [loss * 1.01 for loss in LOSSES]) for name in ("ddp", "zero1", "zero2", "zero3")}
    judged = judge([found, {"bare DDP": row([1.0] * 3)}])  # in whichever group
    assert [name for group in judged for name, each in group.items() if "wrong" in each] == list(found)
    assert not any("wrong" in each for each in judge([found])[0].values())  # alone: with each other


def test_a_model_of_its_own_is_judged_by_itself():
    other = [loss + 1 for loss in LOSSES]
    found = {"hsdp": row([1.0] * 3, other), "bare fully_shard, hybrid": row([2.0] * 3, other)}
    judged = judge([found, {"bare DDP": row([1.0] * 3)}])
    assert not any("wrong" in each for group in judged for each in group.values())
    assert compare(judged, 1)[0] == {"hsdp / bare fully_shard, hybrid": 2.0}
    found["hsdp"] = row([1.0] * 3)  # the losses of the model that it does not have
    assert "loss of step 1 is 3.000000" in judge([found, {"bare DDP": row([1.0] * 3)}])[0]["hsdp"]["wrong"]


def test_a_group_is_added_to_what_was_measured():
    counts = {"launches": 2, "rounds": 3, "warmup": 0, "batch": 4, "length": 128}
    old, new, pair = {"zero3": 1, "bare fully_shard": 2}, {"hsdp": 3, "bare fully_shard, hybrid": 4}, {"ddp": 5}
    machine = {"torch": "2.13.0", "cpu": "a CPU", "cores": 2}
    there = {"settings": counts, "commit": "old", "groups": [old, pair, old], "same_malloc": {"groups": [old]}}
    here = {"settings": counts | {"more": "said"}, "commit": "new"} | machine
    data, measured, same = peers.add_to(there, here, [new, new], [new])
    assert measured == [old, pair, old, new, new] and same == [old, new]
    assert data["commit"] == "old" and data["settings"]["more"] == "said"
    assert data["added"] == [{"contenders": sorted(new), "commit": "new"} | machine]
    there = data | {"groups": measured, "same_malloc": {"groups": same}}
    data, measured, same = peers.add_to(there, here | {"commit": "newer"}, [new], [])  # in place of those before
    assert measured == [old, pair, old, new] and same == [old]
    assert [each["commit"] for each in data["added"]] == ["newer"]
    with pytest.raises(SystemExit, match=r"'rounds': 3.*'rounds': 1"):
        peers.add_to(there, here | {"settings": counts | {"rounds": 1}}, [new], [])


def data_of(found: dict[str, dict]) -> dict:
    judged = judge([found])
    medians, quartiles = compare(judged, 1)
    facts = {"cpu": "a CPU", "torch": "2.13.0", "commit": "0123456789abcdef", "settings": {"ranks": 2, "warmup": 1}}
    same = {"ratios": {"ddp / bare DDP": 0.99}, "quartiles": {"ddp / bare DDP": [0.98, 1.01]}}
    return facts | {"ratios": medians, "quartiles": quartiles, "groups": judged, "same_malloc": same}


def test_the_page_says_what_was_measured_and_why_not(tmp_path):
    shutil.copy(peer_report.DOCS / "peers.md", tmp_path)
    found = measured() | {"zero3": row([1.0] * 3, [3.0, 2.5, 2.0, 2.0])}
    peer_report.show(data_of(found), tmp_path)
    page = (tmp_path / "peers.md").read_text()
    assert (
        "| ddp / bare DDP | 1.000 | 0.750 to 1.250 |" in page and "| ddp / bare DDP | 0.990 | 0.980 to 1.010 |" in page
    )
    assert "| ddp | 3.00 | 375 | 2.1 | 0.0e+00 |" in page
    assert "| HF Trainer | left out: exit code 1: ModuleNotFoundError: No module named 'accelerate' |" in page
    assert "| zero3 | wrong: loss of step 3 is 2.000000, the others' 2.250000 |" in page
    assert "ddp / bare DDP" in (tmp_path / "peers.svg").read_text()
    peer_report.show(data_of(found), tmp_path)
    assert (tmp_path / "peers.md").read_text() == page  # written again it does not grow


def test_losses_are_the_mean_of_ranks_or_what_rank_0_says_of_all():
    def rank(losses):
        return {"losses": losses, "peak_resident_bytes": 1}

    settings = {"steps": 2, "batch": 4, "length": 128}
    assert peers.finish("bare DDP", [rank([3.0, 2.0]), rank([5.0, 3.0])], settings)["losses"] == [4.0, 2.5]
    assert peers.finish("ddp", [rank([3.0, 2.0]), rank(None)], settings)["losses"] == [3.0, 2.0]
    with pytest.raises(ValueError):  # a rank that lost its own
        peers.finish("bare DDP", [rank([3.0, 2.0]), rank([])], settings)


def test_every_contender_is_in_a_pair():
    assert {name for pair in PAIRS for name in pair} == set(CONTENDERS)
    assert OTHER_ROWS < OURS < set(CONTENDERS)


def test_what_operations_do_is_counted():
    """Products by 2 m n k; others by what goes in and comes out; a view, an allocation by nothing; a lookup by what it
    gives, and what it is asked."""
    a, b, table = torch.ones(3, 4), torch.ones(4, 5), torch.ones(1000, 8)
    work = Work()
    with work:
        (a @ b).view(15)
        torch.empty(100)
        assert work.done == {"products": 2 * 3 * 4 * 5, "memory": 0, "sent": 0}
        a + 1
        assert work.done["memory"] == 2 * a.nbytes
        a.mul_(a)
        assert work.done["memory"] == 5 * a.nbytes
        torch.nn.functional.embedding(torch.tensor([1, 7]), table)
    assert work.done["memory"] == 5 * a.nbytes + 2 * 8 + 2 * 8 * 4


@pytest.mark.parametrize(
    ("name", "named", "sent"),
    [
        ("_allgather_base_", ["whole", "part", "whole"], 3 * 1000),  # what is given back was among the arguments
        ("all_gather_into_tensor", ["part", "whole"], 3 * 1000),
        ("_reduce_scatter_base_", ["part", "whole", "part"], 3 * 1000),
        ("allreduce_", ["whole", "whole"], 2 * 3 * 1000),
        ("broadcast_", ["whole"], 3 * 1000),
        ("wait_tensor", ["whole", "whole"], 0),
    ],
)
def test_a_ring_of_four_sends(name, named, sent, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    tensors = {"whole": torch.zeros(1000), "part": torch.zeros(250)}
    assert sent_bytes(name, [*(tensors[each] for each in named), 4, None]) == sent


def test_a_group_of_two_sends_less():
    torch.distributed.init_process_group("fake", rank=0, world_size=4)
    try:
        two, work, whole, part = torch.distributed.new_group([0, 1]), Work(), torch.zeros(1000), torch.zeros(500)
        with work:
            torch.distributed.all_reduce(whole)
            assert work.done["sent"] == 2 * 3 * 1000
            torch.distributed.all_reduce(whole, group=two)
            torch.distributed.all_gather_into_tensor(whole, part, group=two)
        assert work.done["sent"] == 2 * 3 * 1000 + 2 * 2000 + 2000
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_step_is_counted(tmp_path):
    """Ours and the bare loop make the same products, but of the token that nobody predicts; and send as much, but for
    sums of counts and norms."""
    assert peer_work.main(["--tiny", "--only", "zero3", "bare fully_shard", "ddp", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "work.json").read_text())["contenders"]
    ours, bare = found["zero3"], found["bare fully_shard"]
    assert 0.99 < ours["products"] / bare["products"] < 1 and abs(ours["sent"] / bare["sent"] - 1) < 0.01
    assert found["ddp"]["products"] == ours["products"] and "left_out" not in found["bare fully_shard, gathered"]
    page = tmp_path / "peers.md"
    shutil.copy(peer_report.DOCS / "peers.md", page)
    data = {"commit": "0123456789abcdef", "torch": "2.13.0", "contenders": found | {"HF Trainer": {"left_out": "why"}}}
    peer_work.show(data, tmp_path)
    said = page.read_text()
    assert "| HF Trainer | left out: why |  |  |" in said and "A step of one rank, commit 0123456789ab" in said
    peer_work.show(data, tmp_path)
    assert page.read_text() == said


def test_bad_words(tmp_path, capsys):
    assert peers.main(["--rounds", "0"]) == 2 and "--rounds 0" in capsys.readouterr().err
    assert peers.main(["--only", "megatron"]) == 2 and "DeepSpeed ZeRO-1" in capsys.readouterr().err
    assert peers.main(["--tiny"]) == 2 and "--out" in capsys.readouterr().err
    assert peers.main(["--add"]) == 2 and "--add goes with --only" in capsys.readouterr().err


@pytest.mark.slow
def test_the_bench_runs(tmp_path, monkeypatch):
    """A tiny model: ours and bare loops compute the same; one that does not start is left out, with its reason."""
    monkeypatch.setattr(peers, "GROUPS", [["ddp", "bare DDP", "megatron"], ["zero3", "bare fully_shard"]])
    assert peers.main(["--tiny", "--rounds", "2", "--launches", "1", "--warmup", "0", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "peers.json").read_text())
    assert set(found["ratios"]) == set(found["same_malloc"]["ratios"]) == {"ddp / bare DDP", "zero3 / bare fully_shard"}
    assert found["groups"][0].pop("megatron")["left_out"] == "exit code 1: KeyError: 'megatron'"
    for group in found["same_malloc"]["groups"]:
        group.pop("megatron", None)
    for each in [row for group in found["groups"] + found["same_malloc"]["groups"] for row in group.values()]:
        assert len(each["losses"]) == 5 and len(each["seconds"]) == 2 and min(each["seconds"]) > 0
        assert each["largest_difference"] < 1e-5
        assert each["useful_tokens"] == [2 * 4 * 127] * 2


def test_only_takes_a_pair_by_its_name_and_contenders_by_words():
    only = ["zero3 / bare fully_shard", "DDP"]
    chosen = [peers.choose_contenders(group, only) for group in peers.GROUPS]
    assert [group for group in chosen if group] == [["bare DDP"], ["zero3", "bare fully_shard"]]
    assert [peers.choose_contenders(group, []) for group in peers.GROUPS] == peers.GROUPS
