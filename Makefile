# make demo   set up .venv and train a language model on Python's own library, books kept
# make align-demo   train an arithmetic model from scratch, then teach it by rewards, in five minutes
# make test   set up .venv and run every check: lint, types, tests
# make triton install triton (1 GB) into .venv and test the kernels for GPUs in its interpreter, without a GPU
# make ray    install ray (300 MB) into .venv and test pipelines of curation on two nodes of a cluster on this machine
# make docs   build the site into site/: the pages of docs/ and a reference from the docstrings

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
VENV := .venv
READY := $(VENV)/.ready
# The demo and the tests leave nothing outside the clone: the calibration of this machine is kept inside too.
# Workers side by side: threads that spin while they wait would take each other's core.
export GOMP_SPINCOUNT ?= 5000
export NAPKIN_CACHE_DIR ?= $(CURDIR)/.cache

.PHONY: demo align-demo test tests check lint types torture triton ray docs clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(VENV)/bin/napkin demo

align-demo: $(READY)
	$(VENV)/bin/napkin tune demo

# The type checker takes a minute of one core: the tests run meanwhile.
test: lint
	$(MAKE) --no-print-directory --jobs=2 types tests

check: lint types

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(VENV)/bin/basedpyright

tests: $(READY)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m "not torture" -n logical --maxprocesses 4 --dist worksteal

torture: $(READY)
	$(VENV)/bin/python -m pytest -m torture

triton: $(VENV)/.triton-ready
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/kernels/triton_forms

$(VENV)/.triton-ready: $(READY)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[triton]"
	@touch $@

ray: $(VENV)/.ray-ready
	$(VENV)/bin/python -m pytest tests/curation/test_ray_engine.py

$(VENV)/.ray-ready: $(READY)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[ray]"
	@touch $@

docs: $(VENV)/.docs-ready
	$(VENV)/bin/python docs/build_site.py

$(VENV)/.docs-ready: $(READY)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found: install one, or name it with PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version): one to three minutes, once"
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .cache build dist site src/*.egg-info
