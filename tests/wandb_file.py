"""What a .wandb file holds, read with the classes that wandb ships."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

from shardbook.run.wandb_file import HEADER, records


@dataclass
class Recorded:
    group: str = ""
    job_type: str = ""
    config: dict = field(default_factory=dict)
    rows: list[dict] = field(default_factory=list)
    step_metrics: dict[str, str] = field(default_factory=dict)  # metric or glob -> its axis


def read_wandb(path: Path) -> Recorded:
    found, whole = Recorded(), path.read_bytes()
    assert whole[:4] == b":W&B", whole[:HEADER]
    for data in records(whole):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.group, found.job_type = record.run.run_group, record.run.job_type
            found.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update if item.key}
        elif kind == "history":
            found.rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
        elif kind == "metric":
            name = record.metric.name or record.metric.glob_name
            found.step_metrics[name] = record.metric.step_metric or found.step_metrics.get(name, "")
    return found
