# The first that runs: a version manager's shim may be on the PATH for a Python that is not installed.
PYTHON ?= $(shell for python in python3.11 python3.12; do \
	if $$python -c 'import venv' >/dev/null 2>&1; then command -v $$python; break; fi; done)
BIN := .venv/bin

.PHONY: install demo up down test check bench drills schema

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
		{ echo "Tidegate needs Python 3.11 or 3.12, and none runs here: install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[local,dev]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -c constraints.txt rapidocr-onnxruntime==1.4.4  # its OpenCV wants a display
	touch $@

demo: install
	$(BIN)/tidegate demo

up: install
	$(BIN)/tidegate up

down: install
	$(BIN)/tidegate down

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit

bench: install
	$(BIN)/python -m loadtests.bench

drills: install
	$(BIN)/python -m loadtests.drills

schema: install
	$(BIN)/tidegate schema system
