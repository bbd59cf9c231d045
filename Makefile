# Every target sets up what it needs, so each works as the first command on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup test check faults gpu-check bench demo clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "aploss needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tries every fault, not only the fast ones of `make test`, and writes the table of docs/reliability.md; under half an hour.
faults: $(STAMP)
	$(BIN)/python tests/faults/run.py

# Builds the GPU kernels for every kind of GPU, without one; takes some minutes.
gpu-check: $(STAMP)
	$(BIN)/python -m aploss.benchmarks.gpu_check

bench: $(STAMP)
	$(BIN)/aploss bench

demo: $(STAMP)
	$(BIN)/aploss demo

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
