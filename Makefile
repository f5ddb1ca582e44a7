# Everything is set up in .venv from package registries; Python 3.11+ and make are all it needs.
# `make` lists the targets. PYTHON=... chooses another interpreter, ARGS=... is handed on.

VENV := .venv
PY := $(VENV)/bin/python
LOG := $(VENV)/setup.log

# Run a command silently; when it fails, show what it said.
quietly = ( $(1) ) >$(LOG) 2>&1 || { cat $(LOG) >&2; echo "setup: failed, the output is above" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help setup play site train test test-all check bench gallery golden status kernels clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1@/p' $(MAKEFILE_LIST) | \
	    while IFS=@ read -r target words; do printf '%-16s %s\n' "$$target" "$$words"; done

setup: $(VENV)/.web kernels ## set everything up in .venv: compiler, kernels, packages, test tools

play: site ## build the playground and open it in the browser (ARGS="--no-open --port 9000")
	@$(VENV)/bin/posttrainllm play $(ARGS)

site: $(VENV)/.site kernels ## build the playground for any static host: web/dist
	@$(PY) tools/site.py

train: $(VENV)/.base kernels ## train the default model on TinyShakespeare and print what it writes
	@$(VENV)/bin/posttrainllm train $(ARGS)

test: $(VENV)/.web site ## run the tests (ARGS="-k name" picks some)
	@$(PY) -m pytest -q -n 2 -m "not slow" $(ARGS)

test-all: $(VENV)/.web site ## run every test, the slow ones too
	@$(PY) -m pytest -q -n 2 $(ARGS)

check: $(VENV)/.web ## ruff, ruff format, mypy strict, TypeScript strict and the architecture test
	@echo "check: ruff"
	@$(PY) -m ruff check --quiet .
	@echo "check: ruff format"
	@$(PY) -m ruff format --quiet --check .
	@echo "check: mypy"
	@$(PY) -m mypy --no-error-summary
	@echo "check: typescript"
	@cd web && PATH="$(CURDIR)/$(VENV)/bin:$$PATH" npm run --silent check
	@echo "check: architecture"
	@$(PY) -m pytest -q --no-header tests/test_architecture.py

bench: $(VENV)/.base kernels ## measure training steps (ARGS="--preset small --engine cpp")
	@$(VENV)/bin/posttrainllm bench $(ARGS)

gallery: $(VENV)/.dev kernels ## train the bundled models again; wants a GPU (ARGS="shakespeare-small")
	@$(PY) tools/train_gallery.py $(ARGS)

golden: $(VENV)/.dev kernels ## make the golden values again, from the numpy engine in float64
	@$(PY) tests/golden/make_golden.py $(ARGS)

status: $(VENV)/.web site ## run the tests and write docs/status.md from their report and the records
	@$(PY) -m pytest -q -n 2 -m "not slow" --junitxml=build/report.xml $(ARGS) || echo "status: the page names what failed"
	@$(PY) tools/status.py build/report.xml

kernels: $(VENV)/.base ## compile the C++ kernels that changed
	@$(PY) -m posttrainllm.kernels

clean: ## remove .venv, builds and caches (runs/ and the fetched text stay)
	@rm -rf $(VENV) build dist src/*.egg-info src/posttrainllm/kernels/lib src/posttrainllm/site
	@rm -rf web/node_modules web/dist web/.astro web/public/data
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.python:
	@tools/make_venv.sh $(VENV)
	@touch $@

# The base install: what `make train` needs. The build tools come first, so that kernels are compiled
# in sight (inside pip they would be silent) and the install finds them up to date.
$(VENV)/.base: pyproject.toml setup.py | $(VENV)/.python
	@echo "setup: installing the build tools (a C++ compiler from PyPI, about 100 MB)"
	@$(PY) tools/build_requires.py >$(VENV)/build-requires.txt
	@$(call quietly,$(PY) -m pip install -r $(VENV)/build-requires.txt)
	@PYTHONPATH=src $(PY) -m posttrainllm.kernels --no-warnings --prefix "setup: kernels"
	@echo "setup: fetching the default text (TinyShakespeare)"
	@PYTHONPATH=src $(PY) -m posttrainllm.text.datasets
	@echo "setup: installing posttrainllm"
	@$(call quietly,$(PY) -m pip install --no-build-isolation --editable .)
	@touch $@

# What the playground's site is built with: node, from PyPI too.
$(VENV)/.site: $(VENV)/.base
	@echo "setup: installing node (from PyPI, about 60 MB)"
	@$(PY) tools/build_requires.py site >$(VENV)/site-requires.txt
	@$(call quietly,$(PY) -m pip install -r $(VENV)/site-requires.txt)
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "setup: installing the test tools (torch among them: up to a few minutes)"
	@$(call quietly,$(PY) -m pip install --no-build-isolation --editable ".[dev]")
	@touch $@

$(VENV)/.web: web/package-lock.json $(VENV)/.dev $(VENV)/.site
	@$(PY) tools/site.py --tools
	@tools/install_chromium.sh
	@tools/install_vulkan.sh
	@touch $@
