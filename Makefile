# Every target explains itself: `make help`. The two that matter: `make demo` and `make test`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := router/pd_router/native/pump.so
# Where it is set, every process compiles anew what it imports: five times for one engine.
unexport PYTHONDONTWRITEBYTECODE
# Tests of one file stay together, since they share what a module starts. Most wait more than they compute.
CLUSTER := $(BIN)/python -m pytest -n 2 --dist loadfile tests/cluster
FAST := $(BIN)/python -m pytest -n 4 --dist loadfile tests/unit tests/contract tests/component

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-17s %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv with everything: the product, its tools, the CPU engine (about 6 GB)

$(STAMP): requirements/engine-cpu.txt pyproject.toml
	@echo "==> installing into $(VENV) (vLLM for CPU, NIXL, tools)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes --no-deps -r requirements/engine-cpu.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	@echo "==> compiling what was installed: pods see it read-only, and each engine process would compile vLLM again"
	@# -qq and no status: some packages bring templates and old syntax that nobody imports.
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python3*/site-packages || true
	touch $@

$(NATIVE): router/pd_router/native/pump.c | $(STAMP)
	@echo "==> compiling the router's relay of tokens (the router does without where there is no compiler)"
	$(BIN)/python -m pd_router.native

native: $(NATIVE) ## compile the part of the router that relays tokens

demo: $(STAMP) ## a real Kubernetes, the operator, a real pair: reuse ON and OFF; table and two plots
	-$(MAKE) --no-print-directory native
	$(BIN)/pdctl cluster demo

test: $(STAMP) $(NATIVE) lint cluster-binaries store-server promtool ## every test, fast layers first, real engines last
	$(FAST)
	$(CLUSTER)
	$(BIN)/python -m pytest tests/engine

test-fast: $(STAMP) $(NATIVE) cluster-binaries store-server promtool ## unit, contract and component tests only
	$(FAST)

cluster-binaries: $(STAMP) ## build Kubernetes, etcd and helm from Go modules into the cache (once)
	$(BIN)/pdctl cluster build

store-server: $(STAMP) ## unpack a Redis server into the cache, unless one is installed (for tests; starts nothing)
	PYTHONPATH=tests $(BIN)/python -m support.redis_server

promtool: $(STAMP) ## unpack Prometheus' tool into the cache, unless it is installed (for tests of alerts)
	PYTHONPATH=tests $(BIN)/python -m support.promtool

test-cluster: $(STAMP) $(NATIVE) cluster-binaries ## tests on a real Kubernetes of their own; needs root
	$(CLUSTER)

lint: $(STAMP) ## ruff, mypy strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: $(STAMP) $(NATIVE) ## 1.2 million damaged requests, bodies and streams for the router, with progress (minutes)
	$(BIN)/python tests/fuzz/run.py

chaos: $(STAMP) $(NATIVE) ## ten minutes of engines that die, hang and come back under 32 conversations, then a rolling restart
	$(BIN)/python tests/perf/chaos.py --minutes 10 --seed $${SEED:-1}
	$(BIN)/python tests/perf/rolling_restart.py

perf-router: $(STAMP) $(NATIVE) ## CPU per streamed turn: ours, vllm-router and vLLM's example proxy, side by side
	$(BIN)/python tests/perf/router.py

crds: $(STAMP) ## write crds/pddeployments.yaml, the chart's copy and docs/reference.md anew from the models
	$(BIN)/pdctl render --crd > crds/pddeployments.yaml
	cp crds/pddeployments.yaml charts/pd-operator/files/pddeployments.yaml
	$(BIN)/pdctl render --reference > docs/reference.md

metrics: $(STAMP) ## write docs/metrics.md anew from the programs' own metrics
	$(BIN)/python docs/scripts/metrics_page.py

chart: crds metrics ## write the chart's copy of the definition, its table of values, and docs/metrics.md
	$(BIN)/python charts/pd-operator/scripts/values_table.py

COMPILE := $(BIN)/uv pip compile --quiet --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-annotate --no-header --generate-hashes

lock: ## pin requirements/ again from pyproject.toml (hashes, no addresses)
	$(COMPILE) --override requirements/overrides.txt pyproject.toml --extra dev --extra engine-cpu -o requirements/engine-cpu.txt
	for part in build operator router; do \
	  more=$$(test $$part = router && echo "--extra tracing" || true); \
	  $(COMPILE) --constraint requirements/engine-cpu.txt pyproject.toml --extra $$part $$more -o requirements/image-$$part.txt; \
	done

.PHONY: chaos fuzz help install native demo test test-fast cluster-binaries store-server promtool test-cluster lint perf-router crds metrics chart lock
