"""The doctor finds what is there and says what helps with what is not."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cli import checks
from cli.checks import State
from cli.embedded import free_port
from cli.main import app
from cli.options import ENVIRONMENT_FILE
from mesh.settings import ClientSettings


@pytest.fixture
def nowhere(tmp_path):
    """Settings whose every address is a closed port."""
    return ClientSettings(
        redis_url=f"redis://user:secret@127.0.0.1:{free_port()}/0",
        s3_endpoint=f"127.0.0.1:{free_port()}",
        gateway=f"127.0.0.1:{free_port()}",
        data_dir=tmp_path,
    )


def test_closed_ports_fail_with_hint_and_without_password(nowhere):
    for check in (checks.check_redis, checks.check_store, checks.check_gateway):
        found = check(nowhere)
        assert found.state is State.failed
        assert "enginemesh up" in found.hint
        assert "secret" not in found.detail


def test_running_servers_are_ok(valkey, s3, nowhere):
    settings = ClientSettings(
        redis_url=valkey.settings["ENGINEMESH_REDIS_URL"],
        s3_endpoint=s3.settings["ENGINEMESH_S3_ENDPOINT"],
        s3_access_key=s3.settings["ENGINEMESH_S3_ACCESS_KEY"],
        s3_secret_key=s3.settings["ENGINEMESH_S3_SECRET_KEY"],
    )
    redis = checks.check_redis(settings)
    assert redis.state is State.ok
    assert redis.detail.startswith("valkey 9.")
    assert checks.check_store(settings).state is State.ok


def test_wrong_s3_keys_fail(s3):
    settings = ClientSettings(
        s3_endpoint=s3.settings["ENGINEMESH_S3_ENDPOINT"],
        s3_access_key="wrong",
        s3_secret_key="wrong",
    )
    assert checks.check_store(settings).state is State.failed


def test_folder_that_cannot_be_made_fails(tmp_path):
    (tmp_path / "file").touch()
    found = checks.check_folder(tmp_path / "file" / "data")
    assert found.state is State.failed
    assert "--data" in found.hint


def test_folder_is_not_made_by_looking(tmp_path):
    assert checks.check_folder(tmp_path / "data").state is State.ok
    assert not (tmp_path / "data").exists()


def test_doctor_reads_addresses_of_local_mesh_and_ends_with_failure(tmp_path, nowhere):
    port = free_port()
    (tmp_path / ENVIRONMENT_FILE).write_text(
        f"ENGINEMESH_GATEWAY=127.0.0.1:{port}\nENGINEMESH_REDIS_URL={nowhere.redis_url}\n"
        f"ENGINEMESH_S3_ENDPOINT={nowhere.s3_endpoint}\n"
    )
    result = CliRunner().invoke(app, ["doctor", "--data", str(tmp_path), "--json"])
    assert result.exit_code == 1
    found = {check["name"]: check for check in json.loads(result.stdout)}
    assert found["gateway"]["detail"] == f"none serves at 127.0.0.1:{port}"
    assert found["cpu"]["state"] == "ok"
    assert found["s3"]["state"] == "failed"


def test_doctor_table_shows_every_check_and_hint(tmp_path, nowhere, monkeypatch):
    monkeypatch.setenv("ENGINEMESH_GATEWAY", nowhere.gateway)
    monkeypatch.setenv("ENGINEMESH_REDIS_URL", nowhere.redis_url)
    monkeypatch.setenv("ENGINEMESH_S3_ENDPOINT", nowhere.s3_endpoint)
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["doctor", "--data", str(tmp_path)])
    assert result.exit_code == 1
    for word in ("cpu", "data folder", "kind openvino", "redis", "s3", "gateway"):
        assert word in result.stdout
