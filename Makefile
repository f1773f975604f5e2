# Two commands for a fresh machine: `make demo` and `make test`. Each makes its own virtual environment (.venv) and reaches
# nothing but package registries. As root on Debian or Ubuntu they install Slurm's daemons when these are missing; elsewhere
# the demo runs with `scheduler: local`, and the tests say which of them need Slurm and did not run.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick soak faults lint bench clean slurm debian

demo: .venv/.demo slurm
	@$(BIN)/python examples/demo/demo.py

test: .venv/.test debian lint
	@$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

quick: .venv/.test           ## what never leaves memory and files; seconds
	@$(BIN)/python -m pytest tests/unit tests/story -m "not slow" $(ARGS)

soak: .venv/.test debian      ## the long ones
	@$(BIN)/python -m pytest -m slow --timeout 3600 $(ARGS)

faults: .venv/.test debian    ## the tables of threats and faults: every row's test, and the tables with their results
	@$(BIN)/python tests/matrix.py $(ARGS)

lint: .venv/.test
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(BIN)/mypy --no-error-summary

bench: .venv/.test slurm
	@for b in benchmarks/*.py; do $(BIN)/python $$b || exit 1; done

slurm:
	@sh .ci/install-debian

debian:
	@sh .ci/install-debian test

.venv/bin/python:
	@sh .ci/make-venv "$(PYTHON)"

.venv/.demo: .venv/bin/python pyproject.toml
	@echo "installing ftsupervise and what the demo trains on into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	@touch $@

.venv/.test: .venv/bin/python pyproject.toml
	@echo "installing ftsupervise and the test tools into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ .venv/.demo

clean:
	rm -rf .venv .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
