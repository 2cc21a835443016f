# make setup | demo | test | test-real | lint | bench | docs
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Flags that make pip take the CPU build of torch where its index serves a CUDA build first (several GB), as on Linux:
# make setup TORCH_FLAGS="--extra-index-url URL", the URL of the CPU build's index from PyTorch's installation page.
TORCH_FLAGS ?=
.PHONY: setup sglang tokenizers clients demo test test-real lint bench schemas docs

setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "installing into $(VENV): 2 GB and more, minutes without output (TORCH_FLAGS in the Makefile: the CPU build of torch)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH_FLAGS) -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

sglang: .venv-sglang/.ready
.venv-sglang/.ready: tools/sglang/install.sh $(wildcard tools/sglang/*)
	tools/sglang/install.sh .venv-sglang

tokenizers: setup
	PYTHON=$(BIN)/python tools/tokenizers/install.sh || true  # tests that need them skip and say so

clients:
	tools/clients/install.sh .cache/clients

demo: setup
	$(BIN)/gyre demo

test: setup tokenizers lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-real: setup tokenizers sglang clients
	@# One test only waits, for five minutes: it does so beside the others.
	$(BIN)/python -m pytest tests/real/test_keep_alive.py -m real & waits=$$!; \
	$(BIN)/python -m pytest tests/real -m real --ignore=tests/real/test_keep_alive.py; rest=$$?; \
	wait $$waits && exit $$rest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup sglang
	for b in data proxy turns training scheduler emulation; do $(BIN)/python benchmarks/$$b.py --quick || exit 1; done
	$(BIN)/python benchmarks/learns.py

schemas: setup
	$(BIN)/python tools/generate_schemas.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q -f tools/docs/mkdocs.yml
	@echo "built, every link and anchor checked; look at it: $(BIN)/python -m http.server -d site"
