"""GPUs: the peak of the very card, by the name that its driver gives it."""

from dataclasses import astuple

import pytest

from shardbook.gpus import GPUS, gpu_of


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H20-3e", 148e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_peak_flops_are_those_of_the_very_card(name, peak):
    gpu = gpu_of(name)
    assert (gpu and gpu.flops) == peak


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA B200", "b200-180gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA L40", None),
        ("NVIDIA GB200", None),
        ("CPU", None),
    ],
)
def test_the_gpu_that_cuda_names(device_name, name):
    gpu = gpu_of(device_name)
    assert (gpu if gpu and gpu.a_node else None) == (name and GPUS[name])


def test_every_gpu_has_its_source():
    for gpu in GPUS.values():  # one that plans are made for has all figures, another its FLOPs alone
        told = [bool(figure) for figure in astuple(gpu)]
        assert all(told[:-1]) or told == [True] * 3 + [False] * 9 + [True]
        assert gpu.flops > gpu.memory


def test_no_gpu_is_hidden_behind_the_row_of_another():
    assert all(gpu_of(f"NVIDIA {gpu.cuda}") is gpu for gpu in GPUS.values())
