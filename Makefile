# make demo, make test, make test-all (before a release): each makes .venv, installs, and runs. PYTHON: any Python from 3.11 on.
PYTHON ?= python3
EXTRAS ?= test,parity
# The tests start many processes; without .pyc files each would compile what it imports of transformers anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all clean

demo: .venv/installed
	rm -rf runs/demo
	.venv/bin/python -m lpes_jax.search --preset quick --output-path runs/demo

test: ONLY = not fuzz and not long
test-all: ONLY = not fuzz
test test-all: .venv/installed-$(EXTRAS)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/basedpyright
	.venv/bin/python -m pytest -m '$(ONLY)' --numprocesses 2 --dist loadfile --no-loadscope-reorder

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-compile --editable .
	touch $@

.venv/installed-$(EXTRAS): pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-compile --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv runs build dist *.egg-info
