# Everything is set up inside this folder: .venv (environment), models/ (demo model), deploy/kafka/jars (Apache Kafka).
# Variables: PYTHON (3.11 or newer), CONFIG, and pip's own, such as
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu   the CPU build of torch: 3.4 GB in all, 7.4 with PyPI's CUDA build
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
CONFIG ?= deploy/local.toml
PYTEST ?=
DEMO ?=
BIN := .venv/bin
JARS := deploy/kafka/jars
MODEL := models/smollm2-135m-instruct

.PHONY: help setup check format test unit e2e bench demo kafka kafka-if-possible model up down status doctor clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9_-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv from the pinned lock (once; quick when done)
	@PYTHON='$(PYTHON)' sh requirements/setup.sh

check: setup ## what CI checks: ruff, format, pyright, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: check ## set up, check, then run every test
	$(BIN)/python -m pytest $(PYTEST)

unit: setup ## the quick tests only
	$(BIN)/python -m pytest -m 'not slow and not vllm and not gpu' $(PYTEST)

e2e: setup ## the whole loop with a tiny model and real vLLM
	$(BIN)/python -m pytest tests/e2e $(PYTEST)

bench: setup ## every benchmark; make bench-NAME runs one
	@set -e; for file in bench/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

bench-%: setup
	$(BIN)/python bench/bench_$(subst -,_,$*).py

demo: setup model kafka-if-possible ## simulated users teach a real model, live view (DEMO="--plant-bad")
	$(BIN)/headrace demo $(DEMO)

kafka: ## get the durable local broker, Apache Kafka (needs Java 17 and Maven)
	@command -v mvn >/dev/null || { echo "make kafka: mvn (Maven) is not installed; without it the bundled broker is used" >&2; exit 2; }
	@command -v java >/dev/null || { echo "make kafka: java (17 or newer) is not installed; without it the bundled broker is used" >&2; exit 2; }
	@if ls $(JARS)/kafka_2.13-*.jar >/dev/null 2>&1; then echo "Apache Kafka is in $(JARS)"; else \
	  rm -rf $(JARS).part && mvn -B -f deploy/kafka/pom.xml dependency:copy-dependencies \
	    -DoutputDirectory=$(CURDIR)/$(JARS).part >$(JARS).log 2>&1 \
	  && rm -rf $(JARS) && mv $(JARS).part $(JARS) && echo "Apache Kafka is in $(JARS)" \
	  || { grep -m1 ERROR $(JARS).log | cut -c1-300 >&2; echo "make kafka: Maven failed, see $(JARS).log" >&2; exit 1; }; fi

kafka-if-possible:
	@if [ -n "$$HEADRACE_KAFKA_JARS" ] || ls $(JARS)/kafka_2.13-*.jar >/dev/null 2>&1; then :; \
	elif command -v mvn >/dev/null && command -v java >/dev/null; then \
	  $(MAKE) --no-print-directory --silent kafka || echo "Apache Kafka could not be fetched; the bundled memory-only broker is used"; fi

model: setup ## get the demo model, SmolLM2-135M-Instruct (once)
	@$(BIN)/python -m deploy.model $(MODEL)

up: setup model ## start every process of CONFIG in the background
	$(BIN)/headrace up --config $(CONFIG) --detach

down: ## stop what make up started
	$(BIN)/headrace down --config $(CONFIG)

status: ## one screen: what runs, what is served, what is learned
	$(BIN)/headrace status --config $(CONFIG)

doctor: setup ## check this machine and CONFIG, with a fix for each problem
	$(BIN)/headrace doctor --config $(CONFIG)

clean: ## remove the environment and caches; keeps models/ and .headrace/ (your data)
	rm -rf .venv build ./*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
