# Two commands for a fresh machine: `make demo` and `make test`. Each makes its own virtual environment (.venv) and reaches
# nothing but package registries. As root on Debian or Ubuntu they install Slurm's daemons when these are missing; elsewhere
# the demo runs with `scheduler: local`, and the tests say which of them need Slurm and did not run.

PYTHON ?= python3
BIN := .venv/bin
TORCH := .venv-torch
DOCS := .venv-docs
PYTEST ?= -m pytest
VERSIONS ?= bookworm noble trixie resolute sid
LOCKS := $(wildcard .ci/lock/*.txt)
# The tests start interpreters by the thousand: what one has compiled serves the next. Images of Python often forbid it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-torch test-slurm-versions quick soak faults threats lint compiled lowest package coverage lock bench docs clean slurm debian

demo: .venv/.demo slurm
	@$(BIN)/python examples/demo/demo.py

test: .venv/.test debian
	@$(MAKE) --no-print-directory -j 2 lint compiled
	@$(BIN)/python $(PYTEST) -m "not slow" -n 6 --dist loadfile --no-loadscope-reorder $(ARGS)

test-torch: $(TORCH)/.test debian  ## what needs torch, in an environment of its own; says so where torch cannot be had
	@[ ! -e $(TORCH)/.test ] || $(TORCH)/bin/python $(PYTEST) -m "torch and not slow" -n 2 --dist loadfile \
	  $$(grep -rl --include='*.py' 'mark\.torch' tests) $(ARGS)

test-slurm-versions:          ## tests/slurm (or ARGS) on the Slurm and the Python of other releases of Debian and Ubuntu; root
	@code=0; for one in $(VERSIONS); do .ci/slurm-version $$one $(ARGS) || code=1; done; exit $$code

quick: .venv/.test           ## what never leaves memory and files; seconds
	@$(BIN)/python -m pytest tests/unit tests/story -m "not slow" $(ARGS)

soak: .venv/.test $(TORCH)/.test debian  ## the long ones, those with torch too
	@$(BIN)/python -m pytest -m "slow and not torch" --timeout 3600 $(ARGS)
	@[ ! -e $(TORCH)/.test ] || $(TORCH)/bin/python -m pytest -m "slow and torch" --timeout 3600 $(ARGS)

faults: .venv/.test debian    ## the tables of threats and faults: every row's test, and the tables with their results
	@$(BIN)/python tests/matrix.py $(ARGS)

threats: .venv/.test debian   ## the table of threats alone
	@$(BIN)/python tests/matrix.py security $(ARGS)

compiled: .venv/.test         # for the accounts as well that the tests act as, which may write no bytecode here
	@$(BIN)/python -m compileall -q -j 0 ftsupervise templates cron
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true  # once, before all workers do so; what is wrong is told there

lint: .venv/.test
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(BIN)/mypy --no-error-summary

lowest:                       ## quick, with the lowest versions of the dependencies, in .venv-lowest
	@sh .ci/make-lowest "$(PYTHON)"
	@.venv-lowest/bin/python -m pytest tests/unit tests/story -m "not slow" $(ARGS)

package:                      ## the sdist and the wheel in dist/, each installed and started once
	@sh .ci/make-package "$(PYTHON)"

coverage: .venv/.test         ## lines and branches that quick runs, in the processes it starts too; a figure and no gate
	@rm -rf .coverage-data && mkdir .coverage-data
	@$(BIN)/python -m coverage run -m pytest -q tests/unit tests/story -m "not slow" -n 4 --dist loadfile $(ARGS) || true
	@$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report --skip-covered --sort cover

bench: .venv/.test slurm      ## all figures into docs/figures.md, 25 minutes on two quiet cores; ONLY=guard,status for some
	@$(BIN)/python benchmarks/figures.py $(ONLY)

docs: $(DOCS)/.made           ## the manual as a site with search, in site/; its links are checked
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build -f .ci/mkdocs.yml  # --quiet would hide links that lead nowhere
	@echo "the manual is in site/: python3 -m http.server -d site"

slurm:
	@sh .ci/install-debian

debian:
	@sh .ci/install-debian test

lock: .venv/bin/python        ## newer versions of all that make installs, with their hashes
	@sh .ci/renew-lock

.venv/bin/python:
	@sh .ci/make-venv "$(PYTHON)"

.venv/.demo: .venv/bin/python pyproject.toml $(LOCKS)
	@echo "installing ftsupervise and what the demo trains on into .venv ..."
	@sh .ci/install .venv demo
	@touch $@

.venv/.test: .venv/bin/python pyproject.toml $(LOCKS)
	@echo "installing ftsupervise and the test tools into .venv ..."
	@sh .ci/install .venv test
	@touch $@ .venv/.demo

$(TORCH)/.test: pyproject.toml $(LOCKS) .ci/make-torch
	@rm -f $@
	@sh .ci/make-torch "$(PYTHON)"

$(DOCS)/.made: pyproject.toml .ci/lock/docs.txt
	@[ -x $(DOCS)/bin/python ] || sh .ci/make-venv "$(PYTHON)" $(DOCS)
	@sh .ci/install $(DOCS) docs
	@touch $@

clean:
	rm -rf .venv .venv-lock .venv-lowest .venv-package $(TORCH) $(DOCS) .slurm-versions .coverage-data site .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
