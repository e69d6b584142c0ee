# make demo: a swarm of four peers on this machine.  make test: everything that CI checks.
# make image: the container image.  make image-test: build it and let two machines with an engine each train (root).
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt
PEERS ?= 4
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: demo test lint unit swarm-tests image image-test install clean

demo: .venv/.installed
	$(BIN)/noloco-peer swarm --peers $(PEERS) --config configs/demo.yaml

install: .venv/.installed

test: lint unit swarm-tests

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: .venv/.installed-dev
	$(PYTEST) tests/unit tests/docker

swarm-tests: .venv/.installed-dev
	$(PYTEST) tests/netlab tests/swarm

image:
	docker build --file docker/Dockerfile --tag noloco-peer:0.2.0 .

image-test: .venv/.installed-dev
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

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
