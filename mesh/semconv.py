"""Names of span and metric attributes: OpenTelemetry's GenAI and messaging conventions, then our own.

https://opentelemetry.io/docs/specs/semconv/gen-ai/ and .../messaging/. The conventions are still marked as
in development, and the package that holds them as constants moves them between releases, so the few that
are used are written out here.
"""

from __future__ import annotations

ERROR_TYPE = "error.type"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105 -- the name of an attribute, no secret

MESSAGING_SYSTEM = "messaging.system"
MESSAGING_OPERATION_NAME = "messaging.operation.name"
MESSAGING_OPERATION_TYPE = "messaging.operation.type"
MESSAGING_DESTINATION = "messaging.destination.name"
MESSAGING_CONSUMER_GROUP = "messaging.consumer.group.name"
MESSAGING_CLIENT_ID = "messaging.client.id"
MESSAGING_MESSAGE_ID = "messaging.message.id"

REQUEST_ID = "enginemesh.request.id"
ATTEMPT = "enginemesh.attempt"
PRIORITY = "enginemesh.priority"
ENGINE = "enginemesh.engine"
ENGINE_KIND = "enginemesh.engine.kind"
WORKER = "enginemesh.worker"
GATEWAY = "enginemesh.gateway"
BUILD = "enginemesh.build"
BUILD_STAGE = "enginemesh.build.stage"
BUILD_ATTEMPT = "enginemesh.build.attempt"
BUILD_STAGE_KEPT = "enginemesh.build.stage.kept"
TARGET = "enginemesh.target"
MATCH_REASON = "enginemesh.match.reason"
CACHE = "enginemesh.cache"
BYTES = "enginemesh.bytes"

PROVIDER_VALUE = "enginemesh"
MESSAGING_SYSTEM_VALUE = "redis"
FIRST_TOKEN_EVENT = "gen_ai.first_token"  # noqa: S105 -- the name of an event, no secret
