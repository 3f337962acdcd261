"""GPUs and MIG instances are found as NVML tells of them, and chosen as CUDA would choose."""

from __future__ import annotations

import sys

import pytest

from mesh.errors import PreconditionError
from mesh.hardware import detect_target
from mesh.nvml import all_gpus, visible_gpus
from mesh.target import Target, detect_cpu
from tests.mesh import stand_in_nvml
from tests.mesh.stand_in_nvml import Card, Instance, StandIn

GIB = 1 << 30


def h200(number: int = 0, instances=None) -> Card:
    """As read from a real one."""
    return Card(f"GPU-06b7552{number}-0e7f", "NVIDIA H200", (9, 0), 143771, 16896, instances)


def l4(number: int = 0) -> Card:
    return Card(f"GPU-14a4000{number}-1111", "NVIDIA L4", (8, 9), 23034, 7424)


def cut_h200(number: int = 0) -> Card:
    small = Instance(f"MIG-aaaa{number}", "NVIDIA H200 MIG 1g.18gb", 16384, 16)
    media = Instance(f"MIG-bbbb{number}", "NVIDIA H200 MIG 1g.18gb+me", 16384, 16)
    half = Instance(f"MIG-cccc{number}", "NVIDIA H200 MIG 3g.71gb", 71424, 60, slices=3)
    return h200(number, {0: small, 2: media, 5: half})


@pytest.fixture
def host(monkeypatch):
    """Puts the stand-in where pynvml is imported from."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def describe(*cards, **more) -> StandIn:
        stand_in = StandIn(list(cards), **more)
        monkeypatch.setitem(sys.modules, "pynvml", stand_in)
        return stand_in

    return describe


def test_stand_in_has_only_names_of_the_real_package():
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in dir(StandIn) if name.lower().startswith("nvml")]

    assert len(names) > 15
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert stand_in_nvml.NVML_DEVICE_MIG_ENABLE == pynvml.NVML_DEVICE_MIG_ENABLE
    errors = [name for name in names if name.startswith("NVMLError_")]
    assert all(issubclass(getattr(pynvml, name), pynvml.NVMLError) for name in errors)


def test_whole_gpu_is_a_target(host):
    stand_in = host(h200(), cuda=12080)
    (found,) = all_gpus()

    assert found.target == Target(
        device_type="gpu",
        device_name="NVIDIA H200",
        compute_capability="9.0",
        memory_bytes=143771 << 20,
        cuda_major=12,
        multiprocessors=132,
    )
    assert found.target.name == "h200"
    assert found.target.key == "sm90-h200-cuda12"
    assert stand_in.depth == 0


@pytest.mark.parametrize(
    ("card", "more", "multiprocessors"),
    [
        (Card("GPU-1", "NVIDIA X1", (8, 9), 16376, 9728), {}, 76),
        (Card("GPU-1", "NVIDIA X2", (8, 0), 24576, 3584), {}, 56),
        (Card("GPU-1", "NVIDIA X3", (8, 9), 16376, 9728), {"can_count_cores": False}, 0),
    ],
)
def test_unknown_gpu_is_named_by_what_nvml_says(host, card, more, multiprocessors):
    host(card, **more)
    (found,) = all_gpus()

    assert found.target.multiprocessors == multiprocessors
    assert found.target.name == found.target.key
    assert found.target.key.endswith("g-cuda13")


def test_each_instance_is_a_target_and_the_cut_gpu_is_none(host):
    host(cut_h200(), h200(1), l4())
    found = all_gpus()

    assert [gpu.target.name for gpu in found] == [
        "h200:mig-1g.18gb",
        "h200:mig-1g.18gb",
        "h200:mig-3g.71gb",
        "h200",
        "l4",
    ]
    assert found[2].target.key == "sm90-h200-mig-3g.71gb-cuda13"
    assert (found[2].target.memory_bytes, found[2].target.multiprocessors) == (71424 << 20, 60)
    assert (found[2].uuid, found[2].gpu_uuid, found[2].index) == ("MIG-cccc0", "GPU-06b75520-0e7f", 0)


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H200 MIG 1c.3g.71gb", "1c.3g.71gb"),
        ("NVIDIA H200 MIG 1g.18gb-me", "1g.18gb"),
        ("NVIDIA H200", "1g.16gb"),
    ],
)
def test_profile_is_read_from_name_or_attributes(host, name, profile):
    host(h200(0, {0: Instance("MIG-1", name, 16384, 16)}))

    assert all_gpus()[0].target.mig_profile == profile


def test_slice_that_the_table_does_not_know_keeps_its_key(host):
    host(h200(0, {0: Instance("MIG-1", "NVIDIA H200 MIG 1c.3g.71gb", 71424, 20)}))

    assert all_gpus()[0].target.name == "sm90-h200-mig-1c.3g.71gb-cuda13"


@pytest.mark.parametrize("failure", ["NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"])
def test_host_without_driver_has_no_gpus(host, failure):
    host(failure=getattr(stand_in_nvml, failure)())

    assert all_gpus() == []
    assert detect_target(["tensorrt_llm"]) == detect_cpu()


def test_nvml_that_fails_is_an_error(host):
    host(failure=stand_in_nvml.NVMLError_Unknown("GPU is lost"))

    with pytest.raises(PreconditionError, match="GPU is lost") as seen:
        all_gpus()
    assert seen.value.reason == "NVML_FAILED"


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, ["GPU-06b75520-0e7f", "GPU-06b75521-0e7f", "MIG-aaaa2", "MIG-bbbb2", "MIG-cccc2"]),
        ("", []),
        ("1", ["GPU-06b75521-0e7f"]),
        ("1,0", ["GPU-06b75521-0e7f", "GPU-06b75520-0e7f"]),
        (" 1 , 0 ", ["GPU-06b75521-0e7f", "GPU-06b75520-0e7f"]),
        ("0,-1,1", ["GPU-06b75520-0e7f"]),
        ("0,9,1", ["GPU-06b75520-0e7f"]),
        ("NoDevFiles", []),
        ("GPU-06b75521-0e7f", ["GPU-06b75521-0e7f"]),
        ("GPU-06b75521", ["GPU-06b75521-0e7f"]),
        ("MIG-cccc2,MIG-aaaa2", ["MIG-cccc2", "MIG-aaaa2"]),
        ("2", ["MIG-aaaa2"]),
        ("GPU-06b75522", ["MIG-aaaa2"]),
        ("MIG-dddd", []),
    ],
)
def test_visible_devices_are_chosen_as_cuda_does(host, variable, uuids):
    host(h200(0), h200(1), cut_h200(2))
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}

    assert [gpu.uuid for gpu in visible_gpus(all_gpus(), environment)] == uuids


def test_index_among_unlike_gpus_needs_the_order_of_the_bus(host):
    host(l4(), h200())
    names = {"CUDA_VISIBLE_DEVICES": "0"}

    with pytest.raises(PreconditionError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_gpus(all_gpus(), names)
    by_bus = visible_gpus(all_gpus(), {**names, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [gpu.target.name for gpu in by_bus] == ["l4"]
    by_uuid = visible_gpus(all_gpus(), {"CUDA_VISIBLE_DEVICES": "GPU-06b"})
    assert [gpu.target.name for gpu in by_uuid] == ["h200"]


@pytest.mark.parametrize("kinds", [["fake"], ["openvino"], ["openvino", "fake"], []])
def test_kinds_of_the_cpu_run_on_it_beside_a_gpu(host, kinds):
    host(h200())

    assert detect_target(kinds) == detect_cpu()


@pytest.mark.parametrize("kinds", [["tensorrt_llm"], ["vllm", "fake"], ["vllm", "tensorrt_llm"]])
def test_kinds_of_the_gpu_run_on_it(host, kinds):
    host(h200(), h200(1))

    assert detect_target(kinds).name == "h200"


def test_hidden_gpus_leave_the_cpu(host, monkeypatch):
    host(h200())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert detect_target(["vllm"]) == detect_cpu()


def test_instance_is_chosen_by_its_uuid(host, monkeypatch):
    host(cut_h200(), l4())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cccc0")

    assert detect_target(["vllm"]).name == "h200:mig-3g.71gb"


def test_unlike_gpus_are_refused_with_their_names(host):
    host(h200(), l4())

    with pytest.raises(PreconditionError, match=r"not alike \(h200, l4\): choose with CUDA_VISIBLE_DEVICES"):
        detect_target(["vllm"])


def test_kinds_of_cpu_and_gpu_do_not_mix(host):
    host(h200())

    with pytest.raises(PreconditionError, match="openvino, vllm"):
        detect_target(["openvino", "vllm"])
