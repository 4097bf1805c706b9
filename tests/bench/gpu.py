"""Speed and memory of training on one GPU, in minutes: Llama shapes of 1B, 3B and 8B with random weights, on made-up
rows and a byte tokenizer, under several lengths and checkpointings, beside a bare loop; and attention kernels.

Needs no network and no package beyond torch, transformers and what training itself imports. Prints a table and writes
docs/benchmarks/<device>.json, or into the folder that the variable OUT names, after each case; run again, it goes on
with the cases that the time did not suffice for.

    make bench-gpu                                                      # ten minutes at most
    python tests/bench/gpu.py --cases "1b 4x4096 packed none"           # by name
    python tests/bench/gpu.py --minutes 30 --cases "8b*"                # all whose name holds what stands before a *
    python tests/bench/gpu.py --any-device                              # a tiny shape, only to see that it runs
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import attention_kernels
import torch
from gpu_cases import (
    Case,
    cases_of,
    left_out,
    mean_attended,
    model_flops,
    plan_cases,
    write_documents,
)
from watch import PROFILED_STEPS

from shardbook.gpus import gpu_of
from shardbook.run.directory import environment

ROOT = Path(__file__).parents[2]
STEPS = 12
TINY_STEPS = 8
# What a run itself says of a step, and what was predicted of it, that a case keeps from metrics.jsonl
ROWS = ("train/loss", "train/grad_norm", "perf/mfu", "perf/step_seconds", "perf/loader_wait_seconds")
ROWS += (
    "perf/offload_wait_seconds",
    "perf/offload_step_seconds",
    "predicted/memory/peak_bytes",
    "predicted/perf/step_seconds",
)
WITHOUT_FIGURES = ("failed", "left_out", "unfinished")
QUANTISATION_SECONDS = 180
PR_SET_PDEATHSIG, PRCTL = 1, ctypes.CDLL(None).prctl  # looked up here: little is safe between a fork and an exec
LEAST_SECONDS = 45  # with less than this left none is begun
COLUMNS = {  # of the table: key, unit
    "tok/s": ("tokens_per_second", 1, ",.0f"),
    "MFU": ("mfu", 100, ".1f"),
    "step s": ("step_seconds", 1, ".3f"),
    "plan s": ("predicted/perf/step_seconds", 1, ".3f"),
    "peak GB": ("allocated_peak_bytes", 1e-9, ".1f"),
    "plan GB": ("predicted/memory/peak_bytes", 1e-9, ".1f"),
    "reserved": ("reserved_peak_bytes", 1e-9, ".1f"),
    "retries": ("alloc_retries", 1, ".0f"),
    "gemm %": ("gemm", 100, ".0f"),
    "attn %": ("attention", 100, ".0f"),
    "other %": ("other", 100, ".0f"),
    "idle %": ("idle", 100, ".0f"),
}


def prepare(folder: Path, cases: list[Case]) -> None:
    """Tokenizer, rows and an empty recipe in `folder`; on a CPU the tiny shape too."""
    sys.path.append(str(ROOT / "tests" / "support"))
    import tiny

    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "bench.toml").write_text("[train]\nsteps = 1\n")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # widths of whole blocks of four bits
    tiny.config(max_position_embeddings=4096, initializer_range=0.02, **sizes).save_pretrained(folder / "tiny")
    for length in {case.length for case in cases}:
        for kind in ("packed", "whole"):
            write_documents(folder / f"{kind}-{length}.jsonl", kind, length, tokens=STEPS * max(4 * length, 16_384))


def end_of(command: list[str], said: Path, seconds: float, folder: Path, **variables: str) -> int | None:
    """Run `command` with this interpreter, its output to `said`. The exit code; None: it was ended, after `seconds`.
    What it started ends with it: compilers, ranks, loaders."""
    caches = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    allocator = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # for both loops, unless the caller says otherwise
    with said.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=allocator | os.environ | caches | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_with_parent() -> None:
    """Has the kernel end this process, a part's, when the one that started it is killed: else it would hold the card
    that the next call measures on."""
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_case(case: Case, folder: Path, steps: int, seconds: float) -> dict:
    """What the watch saw of it, with tokens/s (padding among them) and MFU; or `failed` and its last line. What ended
    it after the watch had seen all is `ended`. Its checkpoints, of some 15 GB, do not outlive it."""
    out, said, run = folder / "seen.json", folder / "said.txt", folder / "runs" / case.run_name
    out.unlink(missing_ok=True)
    code = end_of(case.command(folder, out, steps), said, seconds, folder)
    over = f"ended after {seconds:.0f} s" if code is None else reason(said.read_text(errors="replace"), code)
    row_of_run = logged(run, steps)
    shutil.rmtree(run, ignore_errors=True)
    if not out.is_file():
        return {"unfinished" if code is None and seconds < case.seconds else "failed": over}
    found = figures(case, folder, json.loads(out.read_text()), row_of_run)
    return found if code == 0 else found | {"ended": over}


def figures(case: Case, folder: Path, seen: dict, row_of_run: dict) -> dict:
    """What is kept of a case: what the watch has seen, what the run said, tokens/s and MFU. Of adapters and experts MFU
    is of the run's own count of FLOPs, at the watch's step time; of peft there is none."""
    speed = case.batch * case.length / seen["step_seconds"]
    row = {"case": asdict(case), "tokens_per_second": speed} | row_of_run
    if not case.adapter and case.loop != "peft" and case.shape != "moe":
        attended = mean_attended(folder / case.rows_file, case.length)
        row["flops_per_token"] = model_flops(
            json.loads((case.shape_folder(folder) / "config.json").read_text()), attended
        )
        if gpu := gpu_of(seen.get("gpu", "")):  # asked where the case ran: this process has no context on the card
            row["mfu"] = speed * row["flops_per_token"] / gpu.flops
    elif "perf/mfu" in row:
        row["mfu"] = row["perf/mfu"] * row["perf/step_seconds"] / seen["step_seconds"]
    return row | seen.pop("shares", {}) | seen


def logged(run: Path, steps: int) -> dict:
    """What the run said of the last step that it logged before the profiled ones; nothing of a loop without a log."""
    if not (run / "metrics.jsonl").is_file():
        return {}
    found: dict = {}
    for row in rows_in((run / "metrics.jsonl").read_text(errors="replace")):
        if row["step"] <= steps - PROFILED_STEPS - 1:
            found |= {key: row[key] for key in ROWS if key in row}
    return found


def run_quantisation(folder: Path, seconds: float) -> dict:
    """What quantisation.py prints; or `failed`, or `unfinished`."""
    said = folder / "said.txt"
    code = end_of([str(Path(__file__).parent / "quantisation.py")], said, seconds, folder)
    if code:
        return {"failed": reason(said.read_text(), code)}
    if code is None:
        return {"unfinished": f"ended after {seconds:.0f} s"}
    *rows, last = rows_in(said.read_text())
    return {"rows": rows, **last}


def rows_in(text: str) -> list[dict]:
    """The objects among its lines; a line that a kill cut in two is none."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found += [json.loads(line)] if line.startswith("{") else []
    return found


def reason(said: str, code: int) -> str:
    """Why a case failed: out of memory by that name, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    short = next((line for line in lines if "out of memory" in line.lower()), None)
    if short:
        amount = re.search(r"Tried to allocate [\d.]+ \w+", said)
        return "out of memory" + (f": {amount[0].lower()}" if amount else "")
    return f"exit code {code}: {lines[-1][:160] if lines else 'no output'}"


def table(rows: dict[str, dict]) -> str:
    """One line a case, figures or why there are none."""
    width = max([*map(len, rows), 4])
    lines = [f"{'case':{width}} " + " ".join(f"{title:>8}" for title in COLUMNS)]
    for name, row in rows.items():
        cells = [format(row[key] * scale, form) if key in row else "" for key, scale, form in COLUMNS.values()]
        why = [f"{kind.replace('_', ' ')}: {row[kind]}" for kind in WITHOUT_FIGURES if kind in row]
        lines.append(f"{name:{width}} " + (why[0] if why else " ".join(f"{cell:>8}" for cell in cells)))
    return "\n".join(lines)


def read_earlier(out: Path, facts: dict, anew: bool) -> dict:
    """What an earlier call measured with the same code, torch and device; else nothing."""
    try:
        found = json.loads(out.read_text())
    except (OSError, ValueError):
        return {}
    return found if not anew and found.get("environment") == facts else {}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=9.5, help="end by then; run again for the rest")
    parser.add_argument("--cases", nargs="*", default=[], help="only these; with a * at its end, all that hold a word")
    parser.add_argument("--plan", action="store_true", help="the six whose peaks are held against the plan's")
    parser.add_argument("--any-device", action="store_true", help="without a GPU: a tiny shape")
    parser.add_argument("--anew", action="store_true", help="measure again what an earlier call measured")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    cuda = torch.cuda.is_available()
    if not cuda and not asked.any_device:
        print("bench-gpu needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    known = plan_cases(cuda) if asked.plan else cases_of(cuda)
    cases, unknown = chosen(known, asked.cases)
    if unknown:
        print(f"--cases {unknown}: no case; there are", *(case.name for case in known), sep="\n  ")
        return 2
    deadline = time.monotonic() + 60 * asked.minutes
    facts = (
        environment()
        | {"code": digest_of_code()}
        | ({"memory_bytes": torch.cuda.get_device_properties(0).total_memory} if cuda else {})
    )
    out = asked.out or default_out()
    out.parent.mkdir(parents=True, exist_ok=True)
    found = read_earlier(out, facts, asked.anew) or {"environment": facts, "attention": [], "cases": {}}

    def due(row: dict) -> bool:
        return not row or "unfinished" in row

    def left(most: float = QUANTISATION_SECONDS) -> float:
        return min(most, deadline - time.monotonic())

    def keep(**rows: object) -> None:
        found.update(rows)
        out.write_text(json.dumps(found, indent=1) + "\n")

    if not found["attention"] and not asked.plan:
        keep(attention=attention_kernels.main("cuda" if cuda else "cpu", attention_kernels.ROUNDS if cuda else 2))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, cases)
        for case in cases:
            if not due(found["cases"].get(case.name, {})):
                continue
            if left() < LEAST_SECONDS:
                row = {"unfinished": f"--minutes {asked.minutes:g} are over; run again"}
            elif why := left_out(case, folder, "cuda" if cuda else "cpu", facts.get("memory_bytes")):
                row = {"left_out": why}
            else:
                row = run_case(case, folder, STEPS if cuda else TINY_STEPS, left(case.seconds))
            keep(cases=found["cases"] | {case.name: row})
            print(table({case.name: row}).splitlines()[-1], flush=True)
        if (
            cuda
            and not asked.cases
            and not asked.plan
            and due(found.get("quantisation", {}))
            and left() >= LEAST_SECONDS
        ):
            keep(quantisation=run_quantisation(folder, left()))
    print(table(found["cases"]), out, sep="\n")
    for name, row in found["cases"].items():
        if row.get("allocated_peak_bytes") and (said := row.get("predicted/memory/peak_bytes")):
            print(f"{name}: predicted {said / row['allocated_peak_bytes'] - 1:+.1%} of what was measured (asked: 5%)")
    return 0


def chosen(known: list[Case], words: list[str]) -> tuple[list[Case], list[str]]:
    """The cases that `words` name, all where there are none; and the words that name none."""
    names = {case.name: case for case in known}
    found = {
        word: [name for name in names if name == word or (word.endswith("*") and word[:-1] in name)] for word in words
    }
    listed = {name for each in found.values() for name in each}
    return [case for case in known if not words or case.name in listed], [word for word in words if not found[word]]


def digest_of_code() -> str:
    """Of the package and the benches, edited or committed: after a change nothing measured before stands beside it."""
    files = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests" / "bench").glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def default_out() -> Path:
    """Where OUT says; else among the repository's data what a GPU measured; what a CPU did is no data."""
    if not torch.cuda.is_available():
        return Path(os.environ.get("OUT") or ROOT / "runs") / "bench-cpu.json"
    folder = Path(os.environ.get("OUT") or ROOT / "docs" / "benchmarks")
    return folder / (re.sub(r"\W+", "-", torch.cuda.get_device_name().lower()) + ".json")


def end_with_parts() -> None:
    """Has SIGTERM, as schedulers send it, end the part that runs too: it is in a session of its own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


if __name__ == "__main__":
    end_with_parts()
    sys.exit(main())
