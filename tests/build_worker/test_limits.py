"""Limits of a build: what breaks one ends with an error that names it, and with all its processes."""

from __future__ import annotations

import psutil
import pytest
from google.rpc import code_pb2, error_details_pb2

from build_worker.limits import LimitWatch, disk_usage, memory_of_group
from enginemesh.v1 import builds_pb2
from mesh import build_operation
from mesh.build_logs import BuildLogs
from mesh.settings import BuildWorkerSettings
from tests.conditions import until

MIB = 1 << 20


def error_info(operation):
    info = error_details_pb2.ErrorInfo()
    assert operation.error.details[0].Unpack(info)
    return info


@pytest.mark.parametrize(
    ("limit", "settings", "options"),
    [
        ("memory", {"build_memory_limit_bytes": 400 * MIB}, {"build_memory_mib": "500"}),
        ("disk", {"build_disk_limit_bytes": 20 * MIB}, {"build_disk_mib": "40"}),
        ("time", {"build_time_limit_s": 1.5}, {}),
    ],
)
async def test_build_above_a_limit_ends_with_its_name(limit, settings, options, run_worker, request):
    queue, create, store, builds_folder = (
        request.getfixturevalue(name) for name in ("queue", "create", "store", "builds_folder")
    )
    run_worker(**settings)

    build_id = await create(options={**options, "compile_ms": "60000", "build_helpers": "1"})
    ended = await queue.wait(build_id, 60.0)

    (setting,) = settings
    info = error_info(ended)
    assert ended.error.code == code_pb2.RESOURCE_EXHAUSTED
    assert (info.reason, info.metadata["limit"]) == ("BUILD_LIMIT", limit)
    assert info.metadata["setting"] == f"ENGINEMESH_{setting.upper()}"
    assert ended.error.message.startswith(f"{limit} limit: ")
    assert descendants() == []
    assert list(builds_folder.iterdir()) == []
    assert ended.error.message in BuildLogs(store.objects).read(ended.name)
    assert {entry.key.split("/")[0] for entry in store.objects.list("")} == {"logs"}


def descendants():
    """What runs of builds of this process."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.name() == "sleep" or "build_worker.build_child" in child.cmdline()
    ]


async def test_cancelled_build_leaves_no_process(run_worker, queue, create, store):
    run_worker()
    build_id = await create(options={"compile_ms": "60000", "build_helpers": "2"})

    async def compiles():
        metadata = build_operation.metadata_of(await queue.get(build_id))
        return metadata.stage == builds_pb2.BUILD_STAGE_COMPILE and len(descendants()) == 4

    await until(compiles)  # the build's process, the guard of its group, two helpers

    await queue.cancel(build_id)
    ended = await queue.wait(build_id, 30.0)

    assert ended.error.code == code_pb2.CANCELLED
    await until(lambda: descendants() == [])
    assert {entry.key.split("/")[0] for entry in store.objects.list("")} == {"logs"}


def test_mapped_files_are_no_memory(tmp_path):
    import mmap
    import os

    path = tmp_path / "weights"
    path.write_bytes(b"x" * (64 * MIB))
    before = memory_of_group(os.getpgid(0))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[::4096].count(b"x") > 0
        assert memory_of_group(os.getpgid(0)) < before + 32 * MIB


def test_disk_usage_counts_what_is_allocated(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"x" * MIB)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)

    assert MIB <= disk_usage(tmp_path) < 2 * MIB


def test_time_that_a_build_waits_does_not_count(tmp_path):
    watch = LimitWatch(BuildWorkerSettings(build_time_limit_s=1e-9), tmp_path)

    assert watch.time_excess()
    watch.leave_out(60.0)
    assert watch.time_excess() is None


def test_no_limit_is_never_broken(tmp_path):
    settings = BuildWorkerSettings(build_time_limit_s=0)

    assert LimitWatch(settings, tmp_path).time_excess() is None
