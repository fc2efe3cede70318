# `make train` and `make test` set up everything they need in .venv; a second run installs nothing.

# The first one that runs: on PATH may be a version manager's shim without such a version.
PYTHONS := python3.11 python3.12
PYTHON ?= $(firstword $(foreach name,$(PYTHONS),$(shell $(name) -V > /dev/null 2>&1 && echo $(name))))
BIN := .venv/bin
INSTALLED := .venv/installed
# A new folder for each run, so that it does not continue an earlier one.
RUN ?= runs/digits-$(shell date +%Y%m%d-%H%M%S)

# The newer TPU compiler; keep in sync with xla_fsdp/tpu.py.
LIBTPU := 0.0.52

.PHONY: help install tpu-compiler data train train-domain train-mae train-dino train-siglip test test-gpu-path test-fast test-long test-torchtpu test-slurm rehearse coverage lint docs format bench bench-start bench-checkpoint bench-gpu bench-domain faults clean

help:
	@echo "make train             set up .venv, then train a small ViT on handwritten digits (3 minutes)"
	@echo "make train-domain      train on mosaics of digits, each image split over 4 virtual devices (5 minutes)"
	@echo "make train-mae         pretrain a masked autoencoder on the digits, without labels (5 minutes)"
	@echo "make train-dino        self-distillation (DINO) on the digits, without labels (5 minutes)"
	@echo "make train-siglip      image-text pre-training (SigLIP) on digits and captions (4 minutes)"
	@echo "make test              set up .venv, then run the tests (15 to 30 minutes)"
	@echo "make install           set up .venv only"
	@echo "make test-gpu-path     test FSDP2 and Megatron-FSDP with PyTorch 2.14 in .venv-newer"
	@echo "make test-fast         run the tests that start no training (a minute or two), for use while editing"
	@echo "make test-long         run the slow tests (about four hours; PART=1/3 runs a third of them)"
	@echo "make test-torchtpu     test TorchTPU in .venv-newer (a few minutes)"
	@echo "make rehearse          run the tests on emulated TPU pods (half an hour)"
	@echo "make coverage          run all of these suites, then list the lines that no test executes (hours)"
	@echo "make test-slurm        test launch/slurm.sbatch with real Slurm daemons on this machine (as root)"
	@echo "make docs              build README.md and docs/ as a site, in site/"
	@echo "make lint              run ruff and mypy"
	@echo "make format            fix and format the code with ruff"
	@echo "make bench             time a training step on XLA"
	@echo "make bench-start       time the startup of the model of make train"
	@echo "make bench-checkpoint  measure what a checkpoint costs training (10 minutes)"
	@echo "make bench-gpu         time a training step on NVIDIA GPUs, compared with timm's own loop"
	@echo "make bench-domain      measure latency and memory of large images on 1 to 8 GPUs (--mesh_domain)"
	@echo "make tpu-compiler      download the newer TPU compiler, for tpu7x, into .libtpu/ (480 MB)"
	@echo "make faults            inject faults into real runs at random moments (hours)"
	@echo "make clean             remove .venv, .venv-newer, datasets/, runs/ and site/"

install: $(INSTALLED)

# An existing environment is used, whatever created it.
define ENVIRONMENT
	@test -x $(1)/bin/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' \
		2> /dev/null || { echo "Python 3.11 or 3.12 is required (tried: $(or $(PYTHON),$(PYTHONS))): run make PYTHON=<one>," \
		"or first: python3 -m pip install --target .uv uv && .uv/bin/uv venv --seed --python 3.11 $(1)"; exit 2; }
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

$(INSTALLED): requirements-tpu.txt requirements-common.txt requirements-imaging.txt tests/requirements.txt
	$(call ENVIRONMENT,.venv)
	@echo "Installing into .venv (10 GB, a few minutes, once) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-r requirements-tpu.txt -r tests/requirements.txt
	touch $@

# The environment for GPUs and TorchTPU: torch_xla needs older versions of PyTorch and libtpu.
NEWER := .venv-newer

$(NEWER)/installed: requirements-gpu.txt requirements-gpu-common.txt requirements-common.txt requirements-torchtpu.txt requirements-imaging.txt tests/requirements.txt tests/hardware/torchtpu/plugin.txt
	$(call ENVIRONMENT,$(NEWER))
	@echo "Installing into $(NEWER) (8 GB, a few minutes, once) ..."
	$(NEWER)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r requirements-gpu.txt -r requirements-torchtpu.txt -r tests/requirements.txt
	$(NEWER)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --require-hashes -r tests/hardware/torchtpu/plugin.txt
	touch $@

tpu-compiler: .libtpu/$(LIBTPU)

.libtpu/$(LIBTPU): | $(INSTALLED)
	rm -rf $@.part
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $@.part libtpu==$(LIBTPU)
	mv $@.part $@

data: datasets/digits

datasets/digits: | $(INSTALLED)
	$(BIN)/python -m data.digits $@

# BACKEND=torchtpu: train with TorchTPU, on a plugin that computes on the CPU.
ifeq ($(BACKEND),torchtpu)
train: $(NEWER)/installed datasets/digits
	$(NEWER)/bin/python -m tests.hardware.torchtpu.plugin -um tests.fakes.torchtpu_on_cpu \
		@recipes/digits.args --data_dir datasets/digits --num_workers 1 --ckpt_dir $(RUN) $(ARGS)
else
train: $(INSTALLED) datasets/digits
	$(BIN)/python -u run_vit_training.py @recipes/digits.args --data_dir datasets/digits \
		--cpu_devices 2 --num_workers 2 --ckpt_dir $(RUN) $(ARGS)
endif

train-domain: $(INSTALLED)
	$(BIN)/python -u run_vit_training.py @recipes/mosaics.args --cpu_devices 4 --mesh_domain 4 \
		--num_workers 1 --ckpt_dir $(subst digits,mosaics,$(RUN)) $(ARGS)

train-mae: $(INSTALLED) datasets/digits
	$(BIN)/python -u run_vit_training.py @recipes/digits_mae.args --data_dir datasets/digits \
		--cpu_devices 2 --num_workers 2 --ckpt_dir $(subst digits,digits-mae,$(RUN)) $(ARGS)

train-dino: $(INSTALLED) datasets/digits
	$(BIN)/python -u run_vit_training.py @recipes/digits_dino.args --data_dir datasets/digits \
		--cpu_devices 2 --num_workers 2 --ckpt_dir $(subst digits,digits-dino,$(RUN)) $(ARGS)

train-siglip: $(INSTALLED)
	$(BIN)/python -u run_vit_training.py @recipes/digits_siglip.args --cpu_devices 2 --num_workers 1 \
		--ckpt_dir $(subst digits,digits-siglip,$(RUN)) $(ARGS)

# COVERAGE=1 records the executed lines, for make coverage. TESTS="tests/*/data" runs only these.
# PART=2/3 runs every third long test from the second on, for several evenings or machines.
RUN_PYTEST = $(if $(COVERAGE),-m coverage run) -m pytest
PYTEST = $(BIN)/python $(RUN_PYTEST)
PYTEST_NEWER = TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NEWER)/bin/python $(RUN_PYTEST)
# Tests also wait: three at a time keep two cores busy.
THREE_AT_A_TIME := -n 3 --dist worksteal
# Tests of a file run in one process, so that they share fixtures. No file takes very long.
FILE_BY_FILE := -n 3 --dist loadfile --no-loadscope-reorder
TESTS ?= tests
PART ?= 1/1
SUITES ?= test test-long rehearse test-torchtpu

test: $(INSTALLED) datasets/digits
	$(PYTEST) $(FILE_BY_FILE) $(TESTS)

# Tests that train on XLA are skipped: there is no torch_xla for the newer PyTorch. Without a GPU,
# the tests use gloo.
GPU_PATH ?= tests/*/torch_fsdp tests/*/models tests/*/training tests/integration/tools/test_gpu_*.py \
	tests/integration/launch/test_launch_gpu.py tests/integration/launch/test_launch_nodes.py

test-gpu-path: $(NEWER)/installed datasets/digits
	$(PYTEST_NEWER) $(THREE_AT_A_TIME) $(GPU_PATH)

test-fast: $(INSTALLED) datasets/digits
	$(PYTEST) $(THREE_AT_A_TIME) -m fast $(TESTS)

test-long: $(INSTALLED) datasets/digits
	$(PYTEST) $(THREE_AT_A_TIME) -m long --part $(PART) $(TESTS)

# Needs both environments: runs move between PyTorch/XLA and TorchTPU. CI uses MARKS="not long".
MARKS ?= long or not long

test-torchtpu: $(INSTALLED) $(NEWER)/installed datasets/digits
	$(PYTEST_NEWER) -m "$(MARKS)" tests/hardware/torchtpu

rehearse: $(INSTALLED) datasets/digits
	$(PYTEST) -m rehearse $(TESTS)

# SUITES="test rehearse" takes less time.
coverage: $(INSTALLED) datasets/digits
	rm -rf runs/coverage
	-for suite in $(SUITES); do $(MAKE) $$suite COVERAGE=1; done
	$(BIN)/python -m coverage combine
	$(BIN)/python -m coverage report --show-missing --skip-covered

test-slurm: $(INSTALLED) datasets/digits
	$(BIN)/python -m tests.hardware.slurm $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A broken link is an error.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx -q -W --keep-going -j 2 -b html -c docs . site
	cp site/README.html site/index.html
	@echo "Open site/index.html in a browser."

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/xla_step.py $(ARGS)

bench-start: $(INSTALLED) datasets/digits
	@mkdir -p runs
	$(BIN)/python benchmarks/start.py --plot runs/start.png @recipes/digits.args \
		--data_dir datasets/digits --cpu_devices 2 --num_workers 2 $(ARGS)

bench-checkpoint: $(INSTALLED)
	@mkdir -p runs
	$(BIN)/python benchmarks/checkpoint.py --json runs/checkpoint.json \
		--plot runs/checkpoint.png $(ARGS)

bench-gpu: $(INSTALLED)
	@mkdir -p runs
	$(BIN)/python benchmarks/gpu_step.py --json runs/gpu_step.json --plot runs/gpu_step.png $(ARGS)

bench-domain: $(INSTALLED)
	@mkdir -p runs
	$(BIN)/python benchmarks/domain_parallel.py --image_size_stop 2048 --image_size_step 1024 \
		--domain_sizes 1 2 4 8 --batch_size 1 2 4 8 --use_mixed_precision \
		--csv runs/domain.csv --plot runs/domain.png $(ARGS)

faults: $(INSTALLED) datasets/digits
	$(BIN)/python -m tests.reliability.faults $(ARGS)

clean:
	rm -rf .venv .venv-newer datasets runs site
