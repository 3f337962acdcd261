"""Chooses how gRPC core does its input and output. Every package of this project imports it first.

Core reads the environment once, when `grpc` is imported, so this must come before that.
"""

from __future__ import annotations

import os

# Core's event engine hands each event from its polling thread to a pool of threads and from there to the
# thread that asyncio listens to. The poller of before, still in core, does without the pool: a unary-stream
# call of three messages costs a fifth less CPU at its server and a third less at its client, and its first
# message comes 0.35 ms sooner (grpcio 1.85 on 2 cores). Whoever sets the variable has the say.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
