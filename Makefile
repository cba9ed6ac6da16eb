# Every target installs what it needs into .venv* first. Needs make and Python >= 3.10 with venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.10 python3.13 python3,$(shell command -v $(name))))
DEVICE ?= cpu
STACK ?= $(if $(filter npu,$(DEVICE)),npu-core0.12.1,cpu)
HASHES ?= yes
SEED ?= 1
KILLS ?= 100
one_of = $(if $(filter $(2),$($(1))),,$(error $(1)=$($(1)) must be one of: $(2)))
$(call one_of,DEVICE,cpu cuda npu)
$(call one_of,HASHES,yes no)
$(call one_of,STACK,$(filter-out docs,$(patsubst constraints/%.txt,%,$(wildcard constraints/*.txt))))

SET := constraints/$(STACK).txt
TORCH := $(shell grep '^torch==' $(SET))
VENV := .venv$(if $(filter-out cpu,$(DEVICE)),-$(DEVICE))$(if $(filter-out cpu,$(STACK)),-$(STACK))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCKED := $(VENV)/requirements.txt
NO_HASHES := $(if $(filter no,$(HASHES)),--no-hashes)
LOCK = $(BIN)/python constraints/locked.py $(SET) $(NO_HASHES)
# The build tools are in a folder of their own, because they would replace the setuptools that the
# installed torch needs. pip itself ignores PYTHONPATH (-E); the builds that it starts follow it.
TOOLS := $(VENV)/build-tools
BUILD_TOOLS := packaging pybind11 setuptools wheel
PIP = PYTHONPATH="$(abspath $(TOOLS))" $(BIN)/python -E -m pip
BUILD := --no-build-isolation --use-pep517
CHECK := --no-deps $(if $(NO_HASHES),,--require-hashes)
QUIET := --no-input --disable-pip-version-check -qq
PIP_INSTALL = $(PIP) install $(QUIET) $(if $(WHEELHOUSE),--no-index --find-links "$(abspath $(WHEELHOUSE))")
PIP_DOWNLOAD = $(PIP) download $(QUIET) --find-links wheelhouse --dest wheelhouse
TORCH_INDEX = $(if $(TORCH_INDEX_URL),--index-url "$(TORCH_INDEX_URL)")
DOCS := $(VENV)/.docs
CODE := mindspeed_rlxf docs examples tests benchmarks constraints setup.py ray_gpt.py preprocess_data.py convert_ckpt.py
PYTEST := $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder

.PHONY: help install demo bring-up test test-long test-hosts chaos mutations lint format docs wheelhouse
unexport PYTHONDONTWRITEBYTECODE  # compiled modules are kept, for the many processes that tests start

help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 18
	@echo 'options           PYTHON=... DEVICE=cpu|cuda|npu STACK=... TORCH_INDEX_URL=... WHEELHOUSE=dir HASHES=yes|no'

install: $(STAMP)  ## the environment alone; WHEELHOUSE=dir installs without network

$(BIN)/python:
	@$(or $(PYTHON),false) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'error: PYTHON=$(PYTHON) must be a Python >= 3.10 with venv (python3.11 and python3.11-venv)' >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(if $(filter-out cpu,$(DEVICE)),--system-site-packages) $(VENV)
ifneq ($(DEVICE),cpu)
	@$(PYTHON) -c 'import sysconfig as s; [print("import site; site.addsitedir(" + repr(s.get_path(n)) + ")") for n in ("purelib", "platlib")]' \
	  > "$$(echo $(VENV)/lib/python3.*/site-packages)/installed_torch.pth"
endif

# pip resolves no dependencies, because the set is complete. On cpu torch comes last: only its CUDA
# libraries are still missing then. On cuda and npu the .pth file above shows the packages of PYTHON,
# torch among them; one is replaced only if a package of ours refuses its version, and a replacement
# may refuse others in turn, hence up to five rounds.
$(STAMP): setup.py pyproject.toml $(SET) constraints/locked.py constraints/SHA256SUMS | $(BIN)/python
	@echo 'installing (a minute or two the first time)'
	@$(if $(NO_HASHES),echo 'HASHES=no: no file is compared with constraints/SHA256SUMS')
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

demo: $(STAMP) $(if $(filter npu,$(DEVICE)),bring-up)  ## train a tiny model by PPO, then print a report
	@run="outputs/demo-$$(date +%Y%m%d-%H%M%S)-$$$$"; \
	echo 'demo, 1 of 3: make the data, and a tiny model that often forgets the carry of a sum'; \
	$(BIN)/python examples/tiny/make.py --output outputs/tiny --seed 1; \
	echo 'demo, 2 of 3: train it by PPO, four roles in two processes; a rule scores the sums'; \
	$(BIN)/python ray_gpt.py --config-name ppo_trainer_tiny training.output_dir="$$run" \
	  training.seed=$(SEED) device.kind=$(DEVICE); \
	echo 'demo, 3 of 3: report what the policy has learnt'; \
	$(BIN)/python examples/tiny/report.py "$$run"

bring-up: $(STAMP)  ## compare DEVICE with numbers recorded on a CPU, stage by stage
	$(BIN)/python examples/tiny/bring_up.py --device $(DEVICE)

# Three processes on two cores: those that run the tests with Ray mostly wait for workers.
test: $(STAMP)  ## unit and distributed tests (PYTEST_ARGS adds arguments)
	$(PYTEST) tests -m "not long" -n 3 $(PYTEST_ARGS)

test-long: $(STAMP)  ## the tests that take longer
	$(PYTEST) tests -m "long and not large" -n 2 $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests -m large $(PYTEST_ARGS)

test-hosts: $(STAMP)  ## test a run on two hosts made of Linux namespaces; needs root
	RLXF_TEST_HOSTS=1 $(BIN)/python -m pytest tests/hosts $(PYTEST_ARGS)

chaos: $(STAMP)  ## kill processes of runs at random moments: KILLS=100 SEED=1, 40 s each
	$(BIN)/python -m tests.chaos --kills $(KILLS) --seed $(SEED)

mutations: $(STAMP)  ## put faults into a copy of the core, list the tests that fail
	$(BIN)/python -m tests.mutations

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: $(STAMP)  ## apply ruff
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(DOCS)  ## build the documentation in outputs/site; Python 3.11 or newer
	$(BIN)/python -m mindspeed_rlxf.config.key_reference docs/configuration.md docs/migrating.md
	$(BIN)/python -m sphinx --builder html --fail-on-warning --nitpicky --fresh-env --quiet \
	  --doctree-dir outputs/site-cache docs outputs/site

$(DOCS): constraints/docs.txt | $(STAMP)
	@$(BIN)/python constraints/locked.py constraints/docs.txt $(NO_HASHES) > $(LOCKED)
	@$(PIP_INSTALL) $(CHECK) $(BUILD) -r $(LOCKED)
	@touch $@

wheelhouse: $(STAMP)  ## download every package into ./wheelhouse
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
