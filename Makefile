# Millrace. `make help` lists the targets.
SHELL := /bin/bash
PY := .venv/bin/python
BIN := .venv/bin
STAMP := .venv/.installed
PORT ?= 8000
GRPC_PORT ?= 8001
WORKERS ?= 1
MODEL ?= smollm2-135m

.PHONY: help setup run up down test test-model test-fault test-peers test-docker test-gpu check protos docs bench bench-gpu format clean

help: ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Install everything that is missing into .venv

$(STAMP): pyproject.toml constraints.txt deploy/setup.sh
	bash deploy/setup.sh
	@touch $@

run: $(STAMP) ## Start the whole stack in the foreground and print a curl line that works
	@$(BIN)/millrace up --port $(PORT) --grpc-port $(GRPC_PORT) --workers $(WORKERS) --model $(MODEL)

up: $(STAMP) ## Start the whole stack in the background
	@$(BIN)/millrace up --port $(PORT) --grpc-port $(GRPC_PORT) --workers $(WORKERS) --model $(MODEL) --detach

down: $(STAMP) ## Drain and stop the stack
	@$(BIN)/millrace down

test: $(STAMP) ## Run the tests
	$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not fault and not docker and not gpu" tests

test-model: $(STAMP) ## Run the long suites on the real model
	$(PY) -m pytest -m "slow and not fault" tests

test-fault: $(STAMP) ## Run the long fault-injection suites
	$(PY) -m pytest -m fault tests

test-peers: $(STAMP) ## Measure the local stack beside others, PEERS="llama.cpp=http://127.0.0.1:8080 vllm=…"
	$(PY) -m benchmarks.peers $(addprefix --peer ,$(PEERS))

test-docker: $(STAMP) ## Build the images and test the compose stack on a real engine
	bash deploy/airgap/start-dockerd.sh
	$(PY) -m pytest -m docker tests/e2e -s

test-gpu: $(STAMP) ## Run the kernels and the runner on a CUDA device (skipped, saying so, without one)
	$(PY) -m pytest -m gpu tests/gpu

check: $(STAMP) ## Format, lint, types, imports, protos, dependencies, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/released.binpb
	bash deploy/protos.sh --check
	$(BIN)/deptry .
	$(PY) docs/generate.py --check

format: $(STAMP) ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(STAMP) ## Regenerate protos/gen
	bash deploy/protos.sh

docs: $(STAMP) ## Regenerate docs/{errors,metrics,configuration}.md
	$(PY) docs/generate.py

bench: $(STAMP) ## Run the benchmarks; results in benchmarks/results
	$(PY) -m benchmarks.scheduler
	$(PY) -m benchmarks.routing
	$(PY) -m benchmarks.router
	$(PY) -m benchmarks.engine
	$(PY) -m benchmarks.ledger
	$(PY) -m benchmarks.export
	$(PY) -m benchmarks.gateway
	$(PY) -m benchmarks.disaggregation
	$(PY) -m benchmarks.platform_share
	$(PY) -m benchmarks.transfer

bench-gpu: $(STAMP) ## Measure a CUDA device and what the kernels make of it; deploy/gpu_check.sh tests it too
	$(PY) -m benchmarks.gpu

clean: ## Remove caches
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
