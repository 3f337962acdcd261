"""gRPC channel arguments, the same on both ends of every connection of the mesh.

Names are those of gRPC core (include/grpc/impl/channel_arg_names.h); core ignores a misspelt one in
silence, so tests/gateway/test_server.py checks what they are there for: pings, bursts, large messages.
"""

from __future__ import annotations

from typing import Any

KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

LINK_MESSAGE_BYTES = 64 << 20
"""Largest message of a link, on both ends: a step of all sequences, or a long prompt's tokens sent again."""

ChannelArguments = list[tuple[str, Any]]


def server_options(max_message_bytes: int) -> ChannelArguments:
    """Arguments of a server: messages up to the limit both ways, patient with pings, ready for bursts."""
    return [
        *_message_limits(max_message_bytes),
        *_keepalive(),
        # Go and Rust clients ping every 10 s whether data flows or not; without these two, core answers
        # with GOAWAY too_many_pings and every stream of the connection is lost.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        # Above these, core cancels new calls of a burst before the server sees them.
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", 1),
    ]


def channel_options(max_message_bytes: int) -> ChannelArguments:
    """Arguments of a client's channel."""
    return [*_message_limits(max_message_bytes), *_keepalive()]


def _message_limits(max_message_bytes: int) -> ChannelArguments:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


def _keepalive() -> ChannelArguments:
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Core waits for a ping's answer by this one, a minute by default, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
