# Every target is listed by `make help`. The environment is .venv in the checkout; nothing else is touched.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS ?= tests

.DEFAULT_GOAL := help
.PHONY: help init demo demo-blocked test test-engine test-s3 test-loop test-api test-cluster bench-operator lint fmt type \
	crds crds-release constraints clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

$(READY): pyproject.toml constraints.txt scripts/setup
	PYTHON=$(PYTHON) scripts/setup $(VENV)
	@touch $@

init: $(READY) ## Make the environment (.venv) with the pinned versions

demo: $(READY) ## The whole loop on this machine: warm start, three rounds, real vLLM, users, report
	$(BIN)/prodrl lab demo --data .prodrl/demo

demo-blocked: $(READY) ## The same loop with a trainer that does harm: the gate blocks it
	$(BIN)/prodrl lab demo --data .prodrl/demo-blocked --harm

test: $(READY) lint type ## Lint, types and every test that this machine can run
	$(BIN)/python -m pytest $(TESTS) $(PYTEST_ARGS)

test-engine: $(READY) ## Only the tests that start a real vLLM server
	$(BIN)/python -m pytest tests -m engine

test-s3: $(READY) ## Only the tests against a real S3 server (built once, with Go)
	$(BIN)/python -m pytest tests/s3

test-loop: $(READY) ## Only the whole loop, while its processes are killed
	$(BIN)/python -m pytest tests/loop

test-api: $(READY) ## Only the tests against a real API server (built once, with Go, or from KUBEBUILDER_ASSETS)
	scripts/kubernetes api >/dev/null
	$(BIN)/python -m pytest tests/api tests/contract tests/faults tests/packaging $(PYTEST_ARGS)

test-cluster: $(READY) ## Only the tests inside a real one-node cluster (root, containerd; vLLM and trainer as pods)
	scripts/kubernetes cluster >/dev/null
	$(BIN)/python -m pytest tests/cluster $(PYTEST_ARGS)

bench-operator: $(READY) ## The operator at 50, 500 and 5,000 runs on a real API server: latency, memory, requests
	scripts/kubernetes api >/dev/null
	$(BIN)/python -m benchmarks.operator $(BENCH_ARGS)

lint: $(READY) ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

fmt: $(READY) ## Format and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

type: $(READY) ## mypy, strict
	$(BIN)/mypy

crds: $(READY) ## Generate crds/, and the Helm chart's copy of it, from the API models
	$(BIN)/prodrl-operator crds --write crds
	$(BIN)/prodrl-operator crds --write manifests/helm/prodrl/files/crds

crds-release: crds ## Keep the CRDs as those of a release: make crds-release VERSION=x.y.z
	$(BIN)/python -m tests.support.crd_diff $(VERSION)

constraints: $(READY) ## Write constraints.txt from the environment
	(sed -n 1p constraints.txt; $(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable | sort -f) > constraints.new
	mv constraints.new constraints.txt

clean: ## Remove what the targets made in the checkout (not the caches outside)
	rm -rf .prodrl .pytest_cache .mypy_cache .ruff_cache .hypothesis
