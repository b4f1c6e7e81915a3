"""Devices that costs can be predicted for: peak speeds and memory from the vendors' datasheets.

All rates are for dense operands (datasheets also print twice as much, for 2:4 sparsity) and, in half
precision, for accumulation in float32, as torch does it. Datasheet gigabytes are read as 10^9 bytes,
the smaller reading. What fraction of a peak a long kernel reaches is an assumption, not a datasheet
figure; the same holds for the time to launch a kernel. Not described: clocks below boost,
interconnects, PCIe and NVL variants.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """What a roofline needs to know."""

    name: str
    peak_flops: Mapping[str, float]
    """FLOP/s of matrix products by type: float64, float32, tf32, bfloat16, float16."""
    bandwidth_bytes_per_s: float
    memory_bytes: int
    launch_s: float
    """Seconds from one kernel to the next when neither computes anything (assumed)."""
    efficiency: float
    """Fraction of the peak rate and bandwidth that a long kernel reaches (assumed)."""
    source: str
    """Where the figures are from."""


def _peaks(
    float64: float, float32: float, tf32: float, bfloat16: float, float16: float
) -> dict[str, float]:
    """Rates by type, from TFLOP/s."""
    tera = {
        "float64": float64,
        "float32": float32,
        "tf32": tf32,
        "bfloat16": bfloat16,
        "float16": float16,
    }
    return {dtype: rate * 1e12 for dtype, rate in tera.items()}


_A100 = _peaks(19.5, 19.5, 156, 312, 312)  # float64 on tensor cores, as cuBLAS uses them
_A100_SOURCE = "NVIDIA A100 Tensor Core GPU datasheet, SXM"
_HOPPER = _peaks(66.9, 66.9, 494.7, 989.4, 989.4)  # float64 on tensor cores

DEVICES = (
    Device(
        "cpu",
        # 8 cores at 3 GHz, two fused multiply-adds of 8 float32 a cycle; half types are widened.
        _peaks(0.384, 0.768, 0.768, 0.768, 0.768),
        bandwidth_bytes_per_s=51.2e9,  # two channels of DDR4-3200
        memory_bytes=16 * 10**9,
        launch_s=2e-6,
        efficiency=0.7,
        source="by definition: 8 AVX2 cores at 3 GHz, dual-channel DDR4-3200",
    ),
    Device(
        "rtx4090",
        _peaks(1.29, 82.6, 82.6, 165.2, 165.2),
        bandwidth_bytes_per_s=1008e9,
        memory_bytes=24 * 10**9,
        launch_s=5e-6,
        efficiency=0.7,
        source="NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090",
    ),
    Device("a100-40gb", _A100, 1555e9, 40 * 10**9, 5e-6, 0.7, _A100_SOURCE),
    Device("a100-80gb", _A100, 2039e9, 80 * 10**9, 5e-6, 0.7, _A100_SOURCE),
    # Any GPU that is not listed: what counts for a plan is how the ops' times compare.
    Device("generic-gpu", _A100, 1555e9, 40 * 10**9, 5e-6, 0.7, "assumed: as the a100-40gb"),
    Device(
        "h100",
        _HOPPER,
        bandwidth_bytes_per_s=3350e9,
        memory_bytes=80 * 10**9,
        launch_s=5e-6,
        efficiency=0.7,
        source="NVIDIA H100 Tensor Core GPU datasheet and architecture whitepaper, SXM5",
    ),
    Device(
        "h200",
        _HOPPER,
        bandwidth_bytes_per_s=4800e9,
        memory_bytes=141 * 10**9,
        launch_s=5e-6,
        efficiency=0.7,
        source="NVIDIA H200 Tensor Core GPU datasheet, SXM",
    ),
)


def device(name: str) -> Device:
    """The device of that name: ``a100-80gb``, ``cuda:A100``, ``NVIDIA GeForce RTX 4090``, ``cpu``.

    Where the name leaves the amount of memory open, the smallest variant is meant.

    Raises:
        ValueError: if there is none; the message lists those that exist.
    """
    wanted = _essence(name)
    for known in DEVICES:
        if known.name == name:
            return known
        model = _essence(known.name.split("-")[0])
        if wanted in (model, f"{model}{known.memory_bytes // 10**9}gb"):
            return known
    names = ", ".join(known.name for known in DEVICES)
    raise ValueError(f"no device {name!r}; there are: {names}")


def _essence(name: str) -> str:
    """What identifies a device in its name: model and memory."""
    return re.sub(r"cuda|nvidia|geforce|rtx|sxm\d?|hbm\d?e?|[^a-z0-9]", "", name.lower())
