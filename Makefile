# Every command that the CI runs. `make demo` and `make test` need Python 3.11 and nothing else.
.PHONY: help setup demo test test-all test-faults test-nodes test-slurm test-mpi test-update test-releases proof golden gpu-projects lint format clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin

# In a pip call of its own, before what depends on it. Without a GPU, a build without CUDA is
# far smaller: make demo TORCH_FROM="--index-url https://download.pytorch.org/whl/cpu"
TORCH := torch==2.13.0
TORCH_FROM ?=

help:
	@echo "make demo    render the default project and train it on two CPU processes"
	@echo "make test    the whole suite"
	@echo "make test-all   projects with all pairs of answers, by their own commands (PROOF=1: with records)"
	@echo "make test-faults   all faults with all strategies, and what the next start makes of them"
	@echo "make test-nodes   several machines, as network namespaces; needs root, or is skipped"
	@echo "make test-slurm   a SLURM of two nodes, started from Debian's packages; needs root, or is skipped"
	@echo "make test-mpi   trainings that Open MPI starts; it must be installed, or root may do so"
	@echo "make test-update   projects that are regenerated: merged, linted, trained on; cruft"
	@echo "make test-releases   other releases of Python and cookiecutter, and projects with the lowest of all dependencies"
	@echo "make proof   train all variants, write records into proof/ and docs/variants.md"
	@echo "make lint    ruff, mypy and shellcheck over this repository"
	@echo "make format  let ruff rewrite the code of this repository"
	@echo "make golden  write the snapshots in tests/golden/, the table of settings and docs/variants.md anew"
	@echo "make gpu-projects   render what tests/gpu trains, for a machine with GPUs"
	@echo "make setup   the environment in $(VENV), which the others make as well"
	@echo "make clean   remove it, and build/"

setup: $(VENV)/.ready

$(VENV)/.ready: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_FROM) '$(TORCH)'
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	touch $@

demo: setup
	PATH="$(BIN):$$PATH" scripts/demo.sh

# Four workers on two cores: the tests wait for processes more than they compute.
test: setup
	PATH="$(BIN):$$PATH" python -m pytest -n 4 --dist worksteal $(ARGS)

# Too long for every change: the nightly workflow runs it.
test-all: setup
	PATH="$(BIN):$$PATH" python -m pytest -n 2 --dist worksteal -m all_pairs tests/all_pairs $(ARGS); \
	status=$$?; [ -z "$(PROOF)" ] || $(BIN)/python -m tests.proof table || exit; exit $$status

# What `make test` does with a few of them.
test-faults: setup
	PATH="$(BIN):$$PATH" python -m pytest -n 2 --dist worksteal -m "faults or not faults" tests/faults $(ARGS)

test-nodes: setup
	PATH="$(BIN):$$PATH" python -m pytest -m nodes tests/nodes $(ARGS)

test-slurm: setup
	PATH="$(BIN):$$PATH" python -m pytest -m slurm tests/slurm $(ARGS)

test-mpi: setup
	PATH="$(BIN):$$PATH" python -m pytest -m mpi tests/mpi $(ARGS)

# What `make test` does with a few of them.
test-update: setup
	PATH="$(BIN):$$PATH" python -m pytest -n 2 --dist worksteal -m "update or not update" tests/update $(ARGS)

# Installs environments from TORCH_FROM and PyPI. A Python that is not here is skipped.
test-releases: setup
	TORCH_FROM="$(TORCH_FROM)" PATH="$(BIN):$$PATH" python -m pytest -n 2 --dist worksteal -m "releases or not releases" tests/releases $(ARGS)

# The page is written after a failure as well, and shows it.
proof: setup
	PROOF=1 PATH="$(BIN):$$PATH" python -m pytest -n 2 --dist worksteal tests/test_training.py -k combination; \
	status=$$?; $(BIN)/python -m tests.proof table || exit; exit $$status

golden: setup
	rm -rf tests/golden
	REFRESH_GOLDEN=1 PATH="$(BIN):$$PATH" python -m pytest --quiet tests/test_golden.py tests/test_docs.py tests/faults/test_page.py -k 'golden or settings or page'
	$(BIN)/python -m tests.proof table

gpu-projects: setup
	$(BIN)/python -m tests.gpu.prerender

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run scripts/*.sh templates/launch/*.sh

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build
