# One verb a chore, the same here and in CI. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
RUN ?= reverse_text
export PATH := $(CURDIR)/.venv/bin:$(CURDIR)/.tools/bin:$(PATH)
export PYTHONUNBUFFERED := 1

.PHONY: help setup demo test test-cluster test-bare test-kernels nix check fmt render bench bench-page gate lock clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: .venv/.ready ## make .venv from the lock; does nothing when it is already so

.venv/.ready: locks/install.sh locks/system.sh locks/sources.sh locks/cpu.txt locks/uv.txt .python-version pyproject.toml
	@bash locks/install.sh
	@touch $@

demo: export ORRERY_RESUME := make demo$(if $(filter-out reverse_text,$(RUN)), RUN=$(RUN))
demo: setup ## run the experiment reverse_text (RUN=... for another) and print its result
	@orrery status $(RUN) >/dev/null # a misspelt RUN ends here, in one sentence
	@snakemake --profile local $(RUN)
	@orrery report $(RUN) --summary

test: setup ## all tests, two parts at a time; ARGS='tests/wire -k packing' runs one pytest
	@$(if $(ARGS),pytest $(ARGS),ALSO='$(ALSO)' bash tests/all.sh)

test-cluster: setup ## boot a Slurm cluster on this Debian 12 machine, build the images, run tests/cluster there; as root
	@bash tests/cluster/test.sh $(ARGS)

test-bare: ## follow the README on a bare Debian 12 root file system (slow); as root
	@ARGS='$(ARGS)' bash tests/bare/test.sh

test-kernels: setup ## the tests of Triton's kernels, under its interpreter
	@bash tests/interpreted.sh $(ARGS)

nix: ## install Nix, with which tests/test_nix.py evaluates the flake; as root
	@bash locks/system.sh nix

check: setup ## lint, formats, types, import contracts, and that manifests/ is up to date
	@ruff check .
	@ruff format --check .
	@snakefmt --check Snakefile
	@mypy
	@lint-imports
	@orrery check
	@python benchmarks/page.py --check

fmt: setup ## format, and mend what can be mended
	@ruff check --fix .
	@ruff format .
	@snakefmt Snakefile

bench-page: setup ## write docs/benchmarks.md from the records under benchmarks/
	@python benchmarks/page.py

render: setup ## write manifests/ from jsonnet/
	@orrery render

bench: setup ## measure again every figure under benchmarks/ that this machine can (slow); the trainer's rows: benchmarks/trainer/rows.py
	@for json in benchmarks/*/*.json; do [ ! -f "$${json%.json}.py" ] || { echo "bench: $$json"; python "$${json%.json}.py" || echo "bench: $$json was not measured here"; }; done

gate: SHAPE ?= cpu
gate: setup ## measure the whole loop (SHAPE=h200_2 for another) and fail where it is worse than the recorded one
	@python benchmarks/async/whole_loop.py --shape $(SHAPE) --gate

lock: ## write the locks anew (newest versions that locks/*.in allow)
	@bash locks/lock.sh

clean: ## remove what make and tests leave behind (not runs/)
	@rm -rf .venv .tools .snakemake .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
