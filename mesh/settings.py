"""Every setting of every process, read from the environment (`ENGINEMESH_<NAME>`) and nowhere else.

Settings of OpenTelemetry keep their standard names (`OTEL_*`) and are read by its SDK.
"""

from __future__ import annotations

import os
import socket
import uuid
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from typing_extensions import Self

MIB = 1 << 20


class MeshSettings(BaseSettings):
    """What every process needs: where Redis and the store are, and where its own files go."""

    model_config = SettingsConfigDict(env_prefix="ENGINEMESH_", frozen=True, extra="ignore")

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey, redis:// or rediss://")
    s3_endpoint: str = Field("127.0.0.1:9000", description="host:port of the S3 server")
    s3_secure: bool = Field(False, description="Speak TLS to the S3 server")
    s3_region: str = Field("us-east-1", description="Region that requests are signed for")
    s3_bucket: str = Field("enginemesh", description="Bucket of blobs, manifests and index; made if absent")
    s3_access_key: SecretStr = Field(SecretStr(""), description="S3 access key")
    s3_secret_key: SecretStr = Field(SecretStr(""), description="S3 secret key")
    trusted_keys: Path | None = Field(
        None,
        description="Public keys whose signatures of engines count: a PEM file, or a folder of *.pub files",
    )
    signature_policy: Literal["require", "warn", "off"] = Field(
        "require", description="Engines that no trusted key signed are refused, used with a warning, or used"
    )
    data_dir: Path = Field(Path(".data"), description="Folder for caches, traces and the embedded services")
    log_format: Literal["console", "json"] = Field("console", description="How log lines look")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level shown"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus endpoint on loopback; 0: none")
    trace_sample_ratio: float = Field(1.0, ge=0, le=1, description="Share of new traces that are recorded")
    lease_ttl_s: float = Field(
        6.0, gt=0, description="A process that has not renewed its lease this long is gone"
    )
    heartbeat_interval_s: float = Field(
        0.25, gt=0, description="Longest silence that a worker keeps on a link"
    )
    silence_limit_s: float = Field(0.65, gt=0, description="A link silent for this long is taken for dead")
    drain_timeout_s: float = Field(30.0, ge=0, description="Grace time after SIGTERM for running streams")


_WILDCARDS = ("0.0.0.0", "::", "[::]", "")  # noqa: S104 - to refuse them

SIGNING_KEY = "Private Ed25519 key, in PEM, that signs what is published"


class ClientSettings(MeshSettings):
    """Settings of the command line."""

    signing_key: Path | None = Field(None, description=SIGNING_KEY)

    gateway: str = Field("127.0.0.1:50051", description="host:port of the gateway that commands talk to")
    max_message_bytes: int = Field(16 * MIB, gt=0, description="Largest gRPC message in either direction")


class GatewaySettings(MeshSettings):
    """Settings of a gateway process."""

    gateway_id: str = Field(
        default_factory=lambda: _process_id("gw"), description="Unique name of this process"
    )
    host: str = Field("127.0.0.1", description="Address that clients reach")
    port: int = Field(50051, ge=0, le=65535, description="Port that clients reach; 0: any free one")
    link_host: str = Field("127.0.0.1", description="Address to listen on for links of workers")
    link_advertise_host: str = Field(
        "",
        description="Host by which workers reach this process, told in every queue entry; empty: link_host",
    )
    link_port: int = Field(0, ge=0, le=65535, description="Port that workers reach; 0: any free one")
    max_message_bytes: int = Field(16 * MIB, gt=0, description="Largest gRPC message in either direction")
    max_prompt_bytes: int = Field(4 * MIB, gt=0, description="Longest prompt or conversation, in UTF-8 bytes")
    max_requests: int = Field(20_000, gt=0, description="Requests in the gateway at once")
    max_client_requests: int = Field(
        10_000, gt=0, description="Requests of one client in the gateway at once"
    )
    max_queued_requests: int = Field(
        10_000, gt=0, description="Requests of one model that wait in the gateway"
    )
    max_queued_tokens: int = Field(50_000_000, gt=0, description="Prompt tokens of one model that wait")
    max_queue_s: float = Field(
        60.0, gt=0, description="A request that would wait longer, by the rate measured, is refused"
    )
    queue_window: int = Field(32, gt=0, description="Waiting requests of a model that are in Redis at once")
    stall_limit_s: float = Field(
        60.0, gt=0, description="A client that reads nothing for this long is cut off"
    )
    max_attempts: int = Field(3, gt=0, description="Workers that a request is tried on")
    default_timeout_s: float = Field(600.0, gt=0, description="Deadline of a call that sets none")

    @model_validator(mode="after")
    def _check_advertised(self) -> Self:
        if self.link_host in _WILDCARDS and not self.link_advertise_host:
            raise ValueError(f"link_advertise_host: needed, as workers cannot call {self.link_host!r}")
        return self

    def link_address(self, port: int) -> str:
        """Where workers reach this process, "host:port", when it listens on `port`."""
        return f"{self.link_advertise_host or self.link_host}:{port}"


class WorkerSettings(MeshSettings):
    """What inference and build workers share."""

    worker_id: str = Field(default_factory=lambda: _process_id("w"), description="Unique name of this worker")
    kinds: str = Field("openvino", description="Engine kinds that this worker handles, with commas between")

    @cached_property
    def kind_list(self) -> list[str]:
        """The kinds as a list, in order of preference."""
        return [kind.strip() for kind in self.kinds.split(",") if kind.strip()]


class InferWorkerSettings(WorkerSettings):
    """Settings of an inference worker."""

    model: str = Field(
        description="Model to serve, or several with commas between, one at a time by demand; no default"
    )
    model_patience_s: float = Field(
        30.0,
        ge=0,
        description="A busy worker of several models turns to one that has waited for this long",
    )
    match_policy: Literal["exact", "same_compute_capability", "compatible"] = Field(
        "exact", description="How near an engine's target must be to this hardware"
    )
    cache_limit_bytes: int = Field(50 << 30, gt=0, description="Engines kept on disk, in bytes")
    take_bite: int = Field(4, gt=0, description="Requests taken from the queue at once, at most")
    claim_idle_s: float = Field(
        1.0, gt=0, description="An unconfirmed entry of another worker is claimed after this"
    )
    engine_stall_limit_s: float = Field(
        60.0, gt=0, description="An engine that has work and says nothing for this long is killed"
    )

    @cached_property
    def model_list(self) -> list[str]:
        """The models as a list, in order of preference; one at least."""
        return [model.strip() for model in self.model.split(",") if model.strip()] or [self.model]


class BuildWorkerSettings(WorkerSettings):
    """Settings of a build worker."""

    source_roots: str = Field(
        "", description="Folders that a model file may name as source, with colons between"
    )
    threads: int = Field(0, ge=0, description="Threads of a build; 0: all cores")
    build_memory_limit_bytes: int = Field(
        0, ge=0, description="Memory of a build, all its processes together; 0: what the host has"
    )
    build_disk_limit_bytes: int = Field(
        0, ge=0, description="Files of a build on this host: source, intermediates, engine; 0: no limit"
    )
    build_time_limit_s: float = Field(
        43_200.0, ge=0, description="Time that one worker may take for a build; 0: no limit"
    )
    build_attempts: int = Field(
        3, gt=0, description="Workers that may die over a build before it is given up"
    )
    build_scratch_limit_bytes: int = Field(
        64 << 30, ge=0, description="A finished part of a build is kept for its next attempt up to this size"
    )
    build_log_limit_bytes: int = Field(
        MIB, ge=4096, le=8 * MIB, description="Log of a build that is kept in the store"
    )
    signing_key: Path | None = Field(None, description=SIGNING_KEY)
    trtllm_build: str = Field("trtllm-build", description="The compiler of TensorRT-LLM: name or path")
    modelopt_python: Path | None = Field(
        None,
        description="Python of the environment that has nvidia-modelopt; unset: the build worker's own",
    )

    @cached_property
    def source_root_list(self) -> list[Path]:
        """The allowed folders, resolved."""
        return [Path(root).resolve() for root in self.source_roots.split(os.pathsep) if root]


def _process_id(prefix: str) -> str:
    """A name that no other process has, and that people can place: host, pid, random."""
    host = socket.gethostname().split(".")[0][:24].lower() or "host"
    return f"{prefix}-{host}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
