# A line with ## is what `make help` says of a target.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt
PEERS ?= 4
WORKERS ?= 3
# the order of a set is a part of what happens in virtual time
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

N ?= 20
TARGET ?= test

.PHONY: demo help install test test-all lint unit simulated smoke long flaky gpu-test image image-test clean

demo: .venv/.installed ## a swarm of four peers on this machine, about two minutes (PEERS=4)
	$(BIN)/noloco-peer swarm --peers $(PEERS) --config configs/demo.yaml

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

install: .venv/.installed ## .venv with noloco-peer and noloco-bootstrap (PYTHON=python3)

test: lint ## what each change passes, 6 to 17 minutes on two cores, as fast as they are: lint, unit, simulated and smoke
	$(PYTEST) -m "not long and not image" tests

test-all: test long ## all tests; CI runs both

lint: .venv/.installed-dev ## ruff, format, mypy and import contracts; .pre-commit-config.yaml runs the same
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: .venv/.installed-dev ## unit tests (WORKERS=3)
	$(PYTEST) -m "not long and not image" tests/unit tests/docker

simulated: .venv/.installed-dev ## swarms in virtual time: 200 seeds
	$(PYTEST) -m "not long" tests/simulated

smoke: .venv/.installed-dev ## one test of each kind with real processes on a real network
	$(PYTEST) -m smoke tests/netlab tests/swarm

long: .venv/.installed-eval ## all other tests with real processes, real networks and long waits
	$(PYTEST) -m long --numprocesses 2 tests

flaky: .venv/.installed-dev ## make test again and again beside three busy processes (N=20 TARGET=test)
	$(BIN)/python -m tests.flaky --runs $(N) --target $(TARGET)

gpu-test: ## what only an accelerator shows, at most 15 minutes; uses .venv or, without it, PYTHON (WHEELS=folder)
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m tests.gpu $(if $(WHEELS),--wheels $(WHEELS)) $(if $(COMMIT),--commit $(COMMIT))

image: ## the container image
	docker build --file docker/Dockerfile --tag noloco-peer:0.2.0 .

image-test: .venv/.installed-dev ## build the image and let two machines with an engine each train (root, minutes)
	$(BIN)/python -m pytest -m image tests/docker

.venv/.installed: pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 14) or sys.exit(f"Python 3.11, 3.12 or 3.13 is needed, this is {v.major}.{v.minor}; say which with make PYTHON=python3.12")'
	@echo "setting up .venv: about two minutes, once"
	@$(PYTHON) -m venv .venv
	@$(PIP) --editable .
	@touch $@

.venv/.installed-dev: .venv/.installed
	@$(PIP) --editable ".[dev]"
	@touch $@

.venv/.installed-eval: .venv/.installed-dev
	@$(PIP) --editable ".[eval]"
	@touch $@

clean: ## remove .venv and caches
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
