#!/usr/bin/env bash
# Generates enginemesh/**/*_pb2*.py from protos/ into the folder $1 (default: the repository).
# $PYTHON has grpcio-tools and mypy-protobuf from requirements/codegen.lock beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
python=${PYTHON:-.venv-codegen/bin/python}
bin=$(dirname "$python")
google=$("$python" -c 'import google.longrunning as g, pathlib; print(pathlib.Path(list(g.__path__)[0]).parents[1])')
# The package ships the file under the name operations_proto.proto, but registers it under its real one.
include=$(mktemp -d)
trap 'rm -rf "$include"' EXIT
mkdir -p "$include/google/longrunning"
cp "$google/google/longrunning/operations_proto.proto" "$include/google/longrunning/operations.proto"
mapfile -t files < <(cd protos && find enginemesh -name '*.proto' | sort)
PATH="$bin:$PATH" "$python" -m grpc_tools.protoc -I protos -I "$include" -I "$google" \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="readable_stubs:$out" --mypy_grpc_out="$out" \
  --include_source_info --descriptor_set_out="$out/.cache/protos.binpb" --include_imports "${files[@]}"
# Only a file with a service needs gRPC code.
for stub in $(cd "$out" && find enginemesh -name '*_pb2_grpc.py*'); do
  source="protos/${stub%%_pb2_grpc.py*}.proto"
  grep -q '^service ' "$source" || rm "$out/$stub"
done
