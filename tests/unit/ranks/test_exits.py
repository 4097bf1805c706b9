"""How long a rank that failed waits before it leaves: those that know the reason go first."""

import pytest
import torch.distributed as dist

from shardbook.ranks import exits
from shardbook.recipe import RecipeError

LOST = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2011"

FULL = "shardbook: runs/mine/metrics.jsonl: No space left on device; free some of that disk, and run the same command"


@pytest.mark.parametrize(
    ("error", "code", "seconds", "said"),
    [
        (RecipeError("data.train = '/data/gloo/rows.jsonl': no such file"), exits.WRONG, [0], "no such file"),
        (OSError("no space left"), exits.FAILED, [0], "run failed: OSError: no space left"),
        (OSError(28, "No space left on device", "runs/mine/metrics.jsonl"), exits.FAILED, [0], FULL),
        (RuntimeError(LOST), exits.FAILED, [exits.PEER_SECONDS, 0], "another rank ended"),
        (dist.DistBackendError("NCCL error"), exits.FAILED, [exits.PEER_SECONDS, 0], "DistBackendError"),
    ],
    ids=["a path with gloo in it", "ours", "a full disk", "gloo lost its peer", "NCCL lost its peer"],
)
def test_who_lost_a_peer_waits_for_a_better_reason(error, code, seconds, said, monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(exits.time, "sleep", slept.append)
    monkeypatch.setattr(exits, "LEAVING", exits.threading.Event())
    monkeypatch.setattr(exits, "ON_FAILURE", [])
    monkeypatch.setattr(exits, "ON_EXIT", [])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert exits.report_error(error, code) == code
    assert slept == seconds and exits.LEAVING.is_set()
    assert said in capsys.readouterr().err.splitlines()[-1]
