"""The bench for a GPU, as far as a CPU can know it: what fits, what counts as what, and that all of it runs."""

import json

import gpu
import pytest
import torch
from gpu_cases import (
    DENSE,
    Case,
    cases_of,
    kept_values,
    left_out,
    mean_attended,
    model_flops,
    plan_cases,
    predicted_peak,
    write_documents,
)
from watch import busy, kind_of, shares, watch

HOPPER = [  # a block's step, abridged: name, start, end in microseconds
    ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", 0.0, 400.0),
    ("triton_poi_fused__to_copy_mul_silu_3", 400.0, 450.0),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", 450.0, 600.0),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", 650.0, 850.0),
    ("triton_tem_fused_flex_attention_backward_5", 850.0, 900.0),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>", 880.0, 950.0),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 300.0, 420.0),
    ("Memcpy HtoD (Pinned -> Device)", 990.0, 1000.0),
]


def test_shares_of_a_recorded_list():
    found = shares(HOPPER)
    assert found["gemm"] == pytest.approx(0.6)  # 400 and 200 of 1,000
    assert found["attention"] == pytest.approx(0.2)  # 150 and 50
    assert found["other"] == pytest.approx(0.11)  # 50 and 10, and what overlaps nothing else: 50 of the optimizer's
    assert found["idle"] == pytest.approx(0.09)  # 600 to 650 and 950 to 990
    assert sum(found.values()) == pytest.approx(1)


def test_a_moment_counts_once():
    assert busy([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    twice = shares([("gemm", 0, 10), ("gemm", 0, 10), ("copy", 5, 20)])
    assert twice == {"gemm": 0.5, "attention": 0.0, "other": 0.5, "idle": 0.0}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "gemm"),
        ("triton_tem_fused_mm_12", "gemm"),
        ("aten::addmm", "gemm"),
        ("aten::addmm_foo", "other"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_0", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "other"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kind_of(name) == kind


def config_of(shape: str) -> dict:
    return json.loads((Case(shape, 8192, 1).shape_folder(None) / "config.json").read_text())


def test_flops_are_those_of_the_shapes():
    """6 a parameter that multiplies, of the counts that Meta gives: not norms, nor 8B's untied embedding. Attention is
    6 * layers * width * length."""
    counts = {
        "1b": 1_235_814_400 - 33 * 2048,
        "3b": 3_212_749_824 - 57 * 3072,
        "8b": 8_030_261_248 - 65 * 4096 - 128_256 * 4096,
    }
    widths = {"1b": 2048, "3b": 3072, "8b": 4096}
    for shape in DENSE:
        config = config_of(shape)
        attention = 6 * config["num_hidden_layers"] * widths[shape] * 8192
        assert model_flops(config, 8192) == 6 * counts[shape] + attention
    assert model_flops(config_of("8b"), 8192) == pytest.approx(51.5e9, rel=1e-3)
    # the block's input; q, attention, o; k and v; gate and up: 4 * 4,096, 2 * 1,024 and 2 * 14,336 values a token
    assert kept_values(config_of("8b"), "selective") == 32 * 47_104
    assert kept_values(config_of("8b"), "full") == 32 * 4096


def test_what_does_not_fit_is_left_out_with_its_reason(tmp_path):
    (tmp_path / "bench.toml").write_text("[train]\nsteps = 1\n")
    (tmp_path / "tokenizer").mkdir()
    large = left_out(Case("8b", 8192, 1, checkpointing="full"), tmp_path, "cuda", 80 * 10**9)
    # 16 bytes for each of 8.03e9 parameters, and 2 for the copy that computes
    assert large == ("needs 147 GB at least (145 of state and gathered units, 2 of activations), the device has 80")
    assert left_out(Case("8b", 8192, 1, checkpointing="full"), tmp_path, "cuda", 150 * 10**9) is None
    assert left_out(Case("1b", 4096, 4), tmp_path, "cuda", 80 * 10**9) is None
    assert left_out(Case("tiny", 128, 2), tmp_path, "cpu", None) is None


def test_cases_have_names_of_their_own_and_cover_what_is_asked():
    cases = cases_of(cuda=True)
    assert len({case.name for case in cases}) == len(cases)
    for shape in DENSE:
        grid = {(c.length, c.checkpointing) for c in cases if c.shape == shape and c.loop == "shardbook"}
        assert grid >= {(length, kind) for length in (4096, 8192) for kind in ("none", "selective", "full")}
        ours = {(c.length, c.batch, c.checkpointing) for c in cases if c.shape == shape and c.rows == "whole"}
        bare = {(c.length, c.batch, c.checkpointing) for c in cases if c.shape == shape and c.loop == "bare"}
        assert bare and bare <= ours  # each bare loop stands beside ours on the same rows


def test_made_up_rows(tmp_path):
    for kind in ("whole", "packed"):
        write_documents(tmp_path / kind, kind, 96, tokens=1000)
    assert mean_attended(tmp_path / "whole", 96) == 96
    assert 6 < mean_attended(tmp_path / "packed", 96) < 33
    again = tmp_path / "again"
    write_documents(again, "packed", 96, tokens=1000)
    assert again.read_text() == (tmp_path / "packed").read_text()


def test_the_table_says_why_a_figure_is_missing():
    short = (
        "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB. GPU 0\nshardbook: failed"
    )
    rows = {
        "a": {"tokens_per_second": 12345.6, "step_seconds": 1.5, "gemm": 0.61},
        "b": {"failed": gpu.reason(short, 1)},
        "c": {"failed": gpu.reason("", 134)},
        "d": {"unfinished": "--minutes 1 are over; run again"},
    }
    lines = gpu.table(rows).splitlines()
    assert lines[1].split() == ["a", "12,346", "1.500", "61"]
    assert lines[2:] == [
        "b    failed: out of memory: tried to allocate 2.10 gib",
        "c    failed: exit code 134: no output",
        "d    unfinished: --minutes 1 are over; run again",
    ]


def test_only_the_same_code_and_device_go_on(tmp_path):
    out = tmp_path / "out.json"
    assert gpu.read_earlier(out, {"torch": "1"}, anew=False) == {}
    out.write_text(json.dumps({"environment": {"torch": "1"}, "cases": {"a": {}}}))
    assert gpu.read_earlier(out, {"torch": "1"}, anew=False)["cases"] == {"a": {}}
    assert gpu.read_earlier(out, {"torch": "2"}, anew=False) == gpu.read_earlier(out, {"torch": "1"}, anew=True) == {}


def test_the_watch_writes_times_before_the_profile_and_all_after_the_last_step(tmp_path):
    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    written = []
    with watch(8, tmp_path / "seen.json"):
        for _ in range(8):
            (weight @ weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            written.append((tmp_path / "seen.json").is_file() and json.loads((tmp_path / "seen.json").read_text()))
    assert written[:4] == [False] * 4 and all(each.keys() == {"step_seconds"} for each in written[4:7])
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert 0 < seen["step_seconds"] < 10 and "allocated_peak_bytes" not in seen  # not measured: absent
    assert seen["shares"]["gemm"] > 0 and sum(seen["shares"].values()) == pytest.approx(1)
    with pytest.raises(ValueError, match="at least 8"), watch(7, tmp_path / "seen.json"):
        pass


@pytest.mark.slow
def test_the_bench_runs_and_goes_on(tmp_path, capsys):
    """On the CPU, a tiny shape; called again, nothing is measured twice; a case that fails says why."""
    out = tmp_path / "bench.json"
    assert gpu.main(["--any-device", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    kernels = {kernel["kernel"]: kernel for kernel in found["attention"][0]["kernels"]}
    assert kernels["mask"]["forward_ms"] > 0 and "left_out" in kernels["varlen"]
    assert len(found["cases"]) == 3
    for row in found["cases"].values():
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(2 * 128) and "mfu" not in row
        assert sum(row[kind] for kind in ("gemm", "attention", "other", "idle")) == pytest.approx(1)
    capsys.readouterr()
    assert gpu.main(["--any-device", "--out", str(out), "--minutes", "0"]) == 0
    assert json.loads(out.read_text()) == found
    broken = Case("tiny", 128, 2, checkpointing="every:9")
    folder = tmp_path / "folder"
    folder.mkdir()
    gpu.prepare(folder, [broken])
    assert "the model has 3 blocks" in gpu.run_case(broken, folder, gpu.TINY_STEPS, 120)["failed"]
    assert gpu.run_case(broken, folder, gpu.TINY_STEPS, 0.1) == {"unfinished": "ended after 0 s"}
    assert gpu.main(["--any-device", "--cases", "70b"]) == 2 and "tiny 2x128 packed none" in capsys.readouterr().out


def test_what_the_plan_is_held_to_fits_a_gpu_of_80_gb(tmp_path):
    (tmp_path / "bench.toml").write_text("[train]\nsteps = 1\n")
    (tmp_path / "tokenizer").mkdir()
    cases = plan_cases(cuda=True)
    peaks = {case.name: predicted_peak(case, tmp_path, "cuda") / 1e9 for case in cases}
    assert len(peaks) == 6 and all("compiled=False" in name for name in peaks)
    assert all(8 < peak < 0.92 * 80 for peak in peaks.values()), peaks


@pytest.mark.slow
def test_a_case_of_the_plan_runs_here(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert gpu.main(["--plan", "--any-device", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["cases"].values()
    assert row["predicted/memory/peak_bytes"] > 10**6 and "plan GB" in capsys.readouterr().out
