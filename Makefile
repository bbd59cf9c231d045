# Every target sets up what it needs, so each works as the first command on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
DEV := $(VENV)/.installed
# Bytecode is compiled when a module is first imported: compiling all of torch takes longer than the demo's imports.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# uv downloads in parallel and unpacks faster. It ignores the configuration of pip, which takes over where uv fails.
install = echo "installing into $(VENV); torch is a large download"; \
	{ $(PIP_INSTALL) uv && $(BIN)/uv pip install --python $(BIN)/python $(1); } || $(PIP_INSTALL) $(1)

.PHONY: setup test test-lowest check faults gpu-check docs dist bench demo clean

setup: $(DEV)

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "aploss needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The demo trains and reports: the extra `detect`. Everything else that tests need is in `dev`, which includes it.
$(DEMO): pyproject.toml | $(VENV)/pyvenv.cfg
	@test $(DEV) -nt pyproject.toml || { $(call install,--editable '.[detect]'); }
	@touch $@

$(DEV): pyproject.toml | $(VENV)/pyvenv.cfg
	@$(call install,--editable '.[dev]')
	@touch $@

test: $(DEV)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# The oldest versions that pyproject.toml allows, in an environment of their own: the losses, and what is fast of the rest.
LOWEST := build/lowest
test-lowest: $(DEV)
	mkdir -p build
	$(BIN)/uv pip compile --quiet --resolution lowest-direct --no-header --no-annotate \
		--extra detect --extra export --extra research pyproject.toml --output-file $(LOWEST).txt
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST) -r $(LOWEST).txt \
		pytest pytest-xdist hypothesis scikit-learn pycocotools
	$(BIN)/uv pip install --quiet --python $(LOWEST) --no-deps --editable .
	$(LOWEST)/bin/python -m pytest -n auto --dist loadfile tests/losses tests/evaluation tests/data tests/test_import.py \
		tests/detectors/test_build.py tests/detectors/test_criterion.py tests/detectors/test_export.py tests/training/test_run.py

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Runs the whole fault suite, not only the fast cases of `make test`, and writes the table of docs/reliability.md.
faults: $(DEV)
	$(BIN)/python tests/faults/run.py

# Compiles the GPU kernels for every kind of GPU, without one; takes some minutes.
gpu-check: $(DEV)
	$(BIN)/python tools/gpu_check.py

# The documents as a site in build/site; stops at a broken link or a public name without documents.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site: build/site/index.html"

# Wheel and sdist in dist/, each tried in clean environments: the loss alone, and every extra.
dist: $(DEV)
	$(BIN)/python tools/prove_dist.py

bench: $(DEV)
	$(BIN)/aploss bench

demo: $(DEMO)
	$(BIN)/aploss demo

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
