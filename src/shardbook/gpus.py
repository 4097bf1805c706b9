"""GPUs, a row each, with the figures of their makers' data sheets: for a run's MFU, its forecast and a plan.

Invariant: a figure is the maker's, and its sheet is named; FLOPs are dense: half of the sheet's figure with sparsity.
"""

import re
from dataclasses import dataclass

from shardbook.recipe import RecipeError, nearest


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Kinds that can be planned for have all figures, with those of their usual nodes."""

    cuda: str  # words of its CUDA device name, in capitals: the name has them all
    flops: float  # dense bf16, per second
    source: str
    gb: float = 0  # of memory, 10^9 bytes; 0: no plan is made for it
    memory: float = 0  # bytes a second
    host_gb: float = 0  # of a node's memory, for each of its GPUs
    a_node: int = 0  # GPUs of a node
    link: float = 0  # bytes a second, each way, from one GPU to the others of its node
    nics: float = 0  # Gbit/s of a node to the others, each way
    pcie: float = 0  # bytes a second, each way, from one GPU to its node's memory
    dram: float = 0  # bytes a second of a node's memory
    disk: float = 0  # bytes a second that all local drives of a node read
    has_p2p: bool = True  # without it `link` is half of pcie's: what a GPU sends to another crosses the node's memory


# a_node, link, nics, pcie, dram and disk of the maker's nodes: 8 cards of 200 Gbit/s, or of 400; 16 channels of
# DDR4-3200, or of DDR5-4800; four PCIe drives, as DeepNVMe measured them (DeepSpeed's blog, June 2025, an ND-H200)
DGX_A100 = (8, 300e9, 1600, 32e9, 410e9, 27e9)
DGX_H100, DGX_B200 = (8, 450e9, 3200, 64e9, 614e9, 27e9), (8, 900e9, 3200, 64e9, 614e9, 27e9)
# a box of PCIe 4.0 cards: 8 channels of DDR4-3200 and one drive; a server of them: as DGX A100, two drives
BOX, SERVER = (8, 16e9, 100, 32e9, 205e9, 7e9, False), (8, 32e9, 400, 32e9, 410e9, 14e9)
# fmt: off
GPUS = {  # a device belongs to the first row whose words are all in its name
    "a100-pcie":    Gpu("A100 PCIE", 312e12, "NVIDIA A100: 312"),
    "a100-40gb":    Gpu("A100 40GB", 312e12, "NVIDIA A100 SXM: 312; DGX A100", 40, 1.555e12, 128, *DGX_A100),
    "a100-80gb":    Gpu("A100", 312e12, "NVIDIA A100 SXM: 312; DGX A100", 80, 2.039e12, 256, *DGX_A100),
    "a800":         Gpu("A800", 312e12, "NVIDIA A800: as A100"),
    "a30":          Gpu("A30", 165e12, "NVIDIA A30: 165"),
    "a10":          Gpu("A10", 125e12, "NVIDIA A10: 125"),
    "h100-pcie":    Gpu("H100 PCIE", 756e12, "NVIDIA H100: 1,513 with sparsity"),
    "h100-nvl":     Gpu("H100 NVL", 835e12, "NVIDIA H100: 1,671 with sparsity"),
    "h100-80gb":    Gpu("H100", 989e12, "NVIDIA H100 SXM: 1,979 with sparsity; DGX H100", 80, 3.35e12, 256, *DGX_H100),
    "h800-pcie":    Gpu("H800 PCIE", 756e12, "NVIDIA H800: as H100 PCIe"),
    "h800":         Gpu("H800", 989e12, "NVIDIA H800: as H100 SXM"),
    "h20":          Gpu("H20", 148e12, "NVIDIA H20: 148"),
    "h200-nvl":     Gpu("H200 NVL", 835e12, "NVIDIA H200: 1,671 with sparsity"),
    "h200-141gb":   Gpu("H200", 989e12, "NVIDIA H200 SXM: 1,979 with sparsity; DGX H200", 141, 4.8e12, 256, *DGX_H100),
    "gh200":        Gpu("GH200", 989e12, "NVIDIA GH200: 1,979 with sparsity"),
    "gb200":        Gpu("GB200", 2500e12, "NVIDIA GB200 NVL72: 360 PFLOP/s with sparsity on 72 GPUs"),
    "b200-180gb":   Gpu("B200", 2250e12, "NVIDIA DGX B200: 36 PFLOP/s with sparsity", 180, 8e12, 256, *DGX_B200),
    "rtx4090-24gb": Gpu("4090", 165e12, "NVIDIA Ada architecture; PCIe 4.0", 24, 1.008e12, 64, *BOX),
    "l40s-48gb":    Gpu("L40S", 362e12, "NVIDIA L40S: 362.05; PCIe 4.0 x16", 48, 0.864e12, 128, *SERVER),
    "l40":          Gpu("L40", 181e12, "NVIDIA L40: 181.05"),
    "l4":           Gpu("L4", 121e12, "NVIDIA L4: 242 with sparsity"),
}
# fmt: on
OTHERS = {"D", "LAPTOP"}  # a name with one of these words is another, weaker card


def gpu_of(device_name: str) -> Gpu | None:
    """Returns the row of the GPU that CUDA calls `device_name` (`NVIDIA H100 80GB HBM3`), None where there is none."""
    words = set(re.split("[ -]", device_name.upper()))
    return None if words & OTHERS else next((gpu for gpu in GPUS.values() if words >= set(gpu.cuda.split())), None)


def find_gpu(name: str) -> Gpu:
    """Returns the GPU called `name`, or the only one whose name begins with it. Raises RecipeError with the nearest
    names."""
    known, word = [each for each, gpu in GPUS.items() if gpu.gb], name.lower()
    matches = [each for each in known if each == word] or [each for each in known if each.startswith(f"{word}-")]
    if len(matches) == 1:
        return GPUS[matches[0]]
    plain = {re.sub(r"[^a-z0-9]|nvidia|geforce|sxm|pcie", "", each): each for each in known}
    asked = re.sub(r"[^a-z0-9]|nvidia|geforce|sxm|pcie", "", word)
    close = matches or [each for key, each in plain.items() if asked and (asked in key or key.startswith(asked[:4]))]
    hint = f"; did you mean {' or '.join(close)}?" if close else nearest(asked, known)
    raise RecipeError(f"--gpu {name}: must be one of {', '.join(known)}{hint}")
