"""What a GPU holds beside the tensors, against the documented figures."""

import pytest

from remat.passes.device_memory import (
    CAPABILITIES,
    DeviceOverheads,
    cublas_workspace,
    nvidia_smi,
    overheads_for,
)
from remat.passes.devices import DEVICES


def test_workspaces_are_those_of_the_architecture() -> None:
    assert overheads_for("a100-80gb").workspaces == 2 * 8_519_680
    assert overheads_for("NVIDIA GeForce RTX 4090").cublas_workspace == 8_519_680
    assert overheads_for("cuda:H100").workspaces == overheads_for("h200").workspaces == 64 * 2**20


def test_workspace_configuration_is_read_as_pytorch_reads_it() -> None:
    assert cublas_workspace(":4096:2:16:8") == 8_519_680
    assert cublas_workspace(":4096:8") == 32 * 2**20
    assert overheads_for("a100-40gb", ":16:8").cublas_workspace == 128 * 1024
    with pytest.raises(ValueError, match=r"':4096:2:16:8'"):
        cublas_workspace("4096")


def test_every_gpu_has_a_capability() -> None:
    assert list(CAPABILITIES) == [device.name for device in DEVICES if device.name != "cpu"]
    with pytest.raises(ValueError, match="cpu is not a GPU"):
        overheads_for("cpu")


def test_nvidia_smi_adds_context_and_communicators() -> None:
    overheads = DeviceOverheads(0, context=(100, 200), nccl_pair=(10, 20), nccl_many=(30, 60))
    assert nvidia_smi(1000, overheads) == (1100, 1200)
    assert nvidia_smi(1000, overheads, world_size=2) == (1110, 1220)
    assert nvidia_smi(1000, overheads, world_size=8) == (1130, 1260)
