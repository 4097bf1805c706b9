"""GPUs: the peak of the very card, by the name that its driver gives it."""

import pytest

from shardbook.gpus import gpu_of


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
