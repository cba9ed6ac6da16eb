# Every target first installs the environment that it needs into .venv* (`make install`). The machine
# must have make and Python >= 3.10 with `venv`.
#
#   PYTHON=...            interpreter for the environment (default: the first on PATH >= 3.10)
#   DEVICE=cpu|cuda|npu   cpu installs torch; cuda and npu use the torch installed for PYTHON
#   STACK=...             tested set of versions, the name of a file of constraints/; each set has an
#                         environment of its own (default: cpu, with DEVICE=npu npu-core0.12.1)
#   TORCH_INDEX_URL=...   package index for torch only (for example one that holds CPU builds)
#   WHEELHOUSE=dir        install from this folder alone, without network (see `make wheelhouse`)
#   HASHES=yes|no         no: install also files that constraints/SHA256SUMS does not list, as from an
#                         index that builds its own or on a system other than Linux (docs/nodes_and_failures.md)
#   SEED=1                seed of `make demo` and `make chaos`
#   KILLS=100             kills of `make chaos`
#   PYTEST_ARGS=...       further arguments of pytest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

DEVICE ?= cpu
STACK ?= $(if $(filter npu,$(DEVICE)),npu-core0.12.1,cpu)
SEED ?= 1
KILLS ?= 100
PYTEST_ARGS ?=
TORCH_INDEX_URL ?=
WHEELHOUSE ?=
HASHES ?= yes
PYTHON ?=

ifeq ($(filter $(DEVICE),cpu cuda npu),)
$(error DEVICE=$(DEVICE) must be one of cpu, cuda, npu)
endif
ifeq ($(filter $(HASHES),yes no),)
$(error HASHES=$(HASHES) must be yes or no)
endif
STACKS := $(filter-out docs,$(patsubst constraints/%.txt,%,$(wildcard constraints/*.txt)))
ifeq ($(filter $(STACK),$(STACKS)),)
$(error STACK=$(STACK) must be one of: $(STACKS))
endif

SET := constraints/$(STACK).txt
TORCH := $(shell grep '^torch==' $(SET))
VENV := .venv$(if $(filter-out cpu,$(DEVICE)),-$(DEVICE))$(if $(filter-out cpu,$(STACK)),-$(STACK))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCKED := $(VENV)/requirements.txt
LOCK = $(BIN)/python constraints/locked.py $(SET) $(if $(filter no,$(HASHES)),--no-hashes)
CHECK := --no-deps $(if $(filter yes,$(HASHES)),--require-hashes)
OFFLINE := $(if $(WHEELHOUSE),--no-index --find-links "$(abspath $(WHEELHOUSE))")
# The build tools are in a folder of their own, because they would replace the setuptools that the
# installed torch needs. pip itself ignores PYTHONPATH (-E); the builds that it starts follow it.
TOOLS := $(VENV)/build-tools
BUILD_TOOLS := packaging pybind11 setuptools wheel
PIP = PYTHONPATH="$(abspath $(TOOLS))" $(BIN)/python -E -m pip
BUILD := --no-build-isolation --use-pep517
# -qq: errors only. The warnings concern the machine, such as a package folder that does not exist.
QUIET := --no-input --disable-pip-version-check -qq
PIP_INSTALL = $(PIP) install $(QUIET) $(OFFLINE)
PIP_DOWNLOAD = $(PIP) download $(QUIET) --find-links wheelhouse --dest wheelhouse
TORCH_INDEX = $(if $(TORCH_INDEX_URL),--index-url "$(TORCH_INDEX_URL)")
DOCS := $(VENV)/.docs
CODE := mindspeed_rlxf docs examples tests benchmarks constraints setup.py ray_gpt.py preprocess_data.py convert_ckpt.py

.PHONY: help install demo bring-up test test-long test-hosts chaos mutations lint format docs wheelhouse

help:
	@printf '%s\n' \
	  'make demo        train a tiny model by PPO, then print a report' \
	  'make bring-up    compare DEVICE with numbers recorded on a CPU, stage by stage' \
	  'make test        unit and distributed tests (PYTEST_ARGS adds arguments)' \
	  'make test-long   the tests that take longer' \
	  'make chaos       kill processes of runs at random moments: KILLS=100 SEED=1' \
	  'make mutations   put faults into a copy of the core, list the tests that fail' \
	  'make test-hosts  test a run on two hosts made of Linux namespaces; needs root' \
	  'make lint        ruff and mypy;  make format  applies ruff' \
	  'make docs        build the documentation in outputs/site; Python 3.11 or newer' \
	  'make wheelhouse  download every package into ./wheelhouse' \
	  'make install     the environment alone; WHEELHOUSE=dir installs without network' \
	  'options          PYTHON=... DEVICE=cpu|cuda|npu STACK=... SEED=1 TORCH_INDEX_URL=... WHEELHOUSE=dir HASHES=yes|no'

install: $(STAMP)

$(BIN)/python:
	@good='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))'; \
	found=''; \
	for candidate in $(or $(PYTHON),python3.11 python3.12 python3.10 python3.13 python3); do \
	  if "$$candidate" -c "$$good" 2>/dev/null; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo 'error: $(if $(PYTHON),PYTHON=$(PYTHON) must be,no interpreter on PATH is) a Python >= 3.10 with venv;' \
	    'install one (for example python3.11 and python3.11-venv) or set PYTHON=path' >&2; \
	  exit 1; \
	fi; \
	echo "environment $(VENV) with $$("$$found" --version)"; \
	rm -rf $(VENV); \
	"$$found" -m venv $(if $(filter-out cpu,$(DEVICE)),--system-site-packages) $(VENV); \
	if [ $(DEVICE) != cpu ]; then \
	  "$$found" -c 'import sysconfig as s; [print("import site; site.addsitedir(" + repr(s.get_path(n)) + ")") for n in ("purelib", "platlib")]' \
	    > "$$(echo $(VENV)/lib/python3.*/site-packages)/installed_torch.pth"; \
	fi

# pip resolves no dependencies (--no-deps), because the set is complete, and installs no file that
# SHA256SUMS does not list. On cpu torch comes last: only its CUDA libraries are still missing then.
# On cuda and npu the .pth file above makes the packages of PYTHON visible, also where PYTHON is a
# virtual environment. Its packages are kept, torch among them; a package is replaced only where one
# of ours refuses its version. A replacement may refuse others in turn, hence up to five rounds.
$(STAMP): setup.py pyproject.toml $(SET) constraints/locked.py constraints/SHA256SUMS | $(BIN)/python
	@echo 'installing (a minute or two the first time)'
ifeq ($(HASHES),no)
	@echo 'HASHES=no: no file is compared with constraints/SHA256SUMS'
endif
	@rm -rf $(TOOLS)
	@$(LOCK) --only $(BUILD_TOOLS) > $(LOCKED)
	@$(PIP_INSTALL) $(CHECK) --target $(TOOLS) -r $(LOCKED)
	@$(PIP_INSTALL) --no-deps $(BUILD) -e .
ifeq ($(DEVICE),cpu)
	@$(LOCK) > $(LOCKED)
	@$(PIP_INSTALL) $(CHECK) $(BUILD) -r $(LOCKED)
	@$(PIP_INSTALL) --no-warn-conflicts $(if $(WHEELHOUSE),,$(TORCH_INDEX)) $(TORCH)
else
	@$(LOCK) --absent > $(LOCKED)
	@$(PIP_INSTALL) $(CHECK) $(BUILD) -r $(LOCKED)
	@for round in 1 2 3 4 5; do \
	  $(LOCK) --misfits > $(LOCKED); \
	  [ -s $(LOCKED) ] || break; \
	  $(PIP_INSTALL) $(CHECK) $(BUILD) -r $(LOCKED); \
	done
endif
	@touch $@

# On NPU the bring-up runs before the demo: it names the stage that fails.
demo: $(STAMP) $(if $(filter npu,$(DEVICE)),bring-up)
	@run="outputs/demo-$$(date +%Y%m%d-%H%M%S)-$$$$"; \
	echo 'demo, 1 of 3: make the data, and a tiny model that often forgets the carry of a sum'; \
	$(BIN)/python examples/tiny/make.py --output outputs/tiny --seed 1; \
	echo 'demo, 2 of 3: train it by PPO, four roles in two processes; a rule scores the sums'; \
	$(BIN)/python ray_gpt.py --config-name ppo_trainer_tiny training.output_dir="$$run" \
	  training.seed=$(SEED) device.kind=$(DEVICE); \
	echo 'demo, 3 of 3: report what the policy has learnt'; \
	$(BIN)/python examples/tiny/report.py "$$run"

bring-up: $(STAMP)
	$(BIN)/python examples/tiny/bring_up.py --device $(DEVICE)

# Compiled modules are kept, for the many processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

# Three processes on two cores: those that run the tests with Ray mostly wait for workers.
test: $(STAMP)
	$(BIN)/python -m pytest tests -m "not long" -n 3 --dist loadgroup --no-loadscope-reorder \
	  $(PYTEST_ARGS)

# Hosts made of Linux namespaces; needs root. The tests fail with the reason where a tool or a right
# is missing.
test-hosts: $(STAMP)
	RLXF_TEST_HOSTS=1 $(BIN)/python -m pytest tests/hosts $(PYTEST_ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest tests -m "long and not large" -n 2 --dist loadgroup --no-loadscope-reorder \
	  $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests -m large $(PYTEST_ARGS)

# About 40 s for each kill: see docs/results.md.
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --kills $(KILLS) --seed $(SEED)

# About half an hour: see tests/mutations/__main__.py.
mutations: $(STAMP)
	$(BIN)/python -m tests.mutations

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# The site loads nothing from other servers; a warning of the build is an error. The target is phony
# because a folder is named `docs` too.
docs: $(DOCS)
	$(BIN)/python -m mindspeed_rlxf.config.key_reference docs/configuration.md docs/migrating.md
	$(BIN)/python -m sphinx --builder html --fail-on-warning --nitpicky --fresh-env --quiet \
	  --doctree-dir outputs/site-cache docs outputs/site
	@echo 'wrote outputs/site/index.html'

$(DOCS): constraints/docs.txt | $(STAMP)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'error: make docs needs Python 3.11 or newer; use PYTHON=python3.11 in a new clone' >&2; exit 1; }
	@$(BIN)/python constraints/locked.py constraints/docs.txt $(if $(filter no,$(HASHES)),--no-hashes) > $(LOCKED)
	@$(PIP_INSTALL) $(CHECK) $(BUILD) -r $(LOCKED)
	@touch $@

# Download every package of the set that this environment has, on cpu also torch with the CUDA
# libraries that its build may require, and build the wheel of this project.
wheelhouse: $(STAMP)
	@mkdir -p wheelhouse
	@$(PIP) list --local --format=freeze --disable-pip-version-check \
	  --exclude torch --exclude pip --exclude mindspeed-rlxf > $(VENV)/wheelhouse.txt
	@$(LOCK) --only $(BUILD_TOOLS) $$(sed 's/==.*//' $(VENV)/wheelhouse.txt) > $(LOCKED)
	@$(PIP_DOWNLOAD) $(CHECK) $(BUILD) -r $(LOCKED)
ifeq ($(DEVICE),cpu)
	@$(PIP_DOWNLOAD) $(TORCH_INDEX) -c $(VENV)/wheelhouse.txt $(TORCH)
endif
	@rm -f wheelhouse/mindspeed_rlxf-*.whl
	@$(PIP) wheel $(QUIET) --no-deps $(BUILD) --wheel-dir wheelhouse .
	@echo "wheelhouse: $$(ls wheelhouse | wc -l) files, $$(du -sh wheelhouse | cut -f1);" \
	  'on the other machine: make install WHEELHOUSE=wheelhouse'
