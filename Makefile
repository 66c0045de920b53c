# Everything a developer or CI runs. `make demo` and `make test` set up what they need.
.DEFAULT_GOAL := help
.PHONY: help setup deb container release lint lint-packages unit netns kmod kmod-debug lab pair test test-all browser screenshots fuzz mutants demo soak events bottlenecks results bench-scale format clean
SHELL := /bin/bash
CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/vsrtune
SUITE := tests/unit tests/browser tests/netns tests/lab

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "%-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Debian packages and the development environment, outside the tree
	@tests/setup >/dev/null && tests/promtool

deb: ## the .deb files of the working tree, outside it (OUT=DIR); needs neither a lab nor a network
	@tests/lab/lab package --output $(or $(OUT),$(CACHE)/debs)

container: ## the image of the DaemonSet's container, outside the tree (OUT=DIR)
	@tests/lab/lab container --output $(or $(OUT),$(CACHE)/debs)

release: ## .deb files, source, checksums and news of HEAD, outside the tree (OUT=DIR)
	@tests/release $(or $(OUT),$(CACHE)/release)

lint: setup ## ruff, mypy --strict, shellcheck, yamllint
	@venv=$$(tests/setup) && \
	echo "== lint: ruff" && $$venv/bin/ruff check . && $$venv/bin/ruff format --check . && \
	echo "== lint: mypy --strict" && $$venv/bin/mypy && \
	echo "== lint: shellcheck" && grep -rlE --exclude-dir=.git --exclude='*.md' '^#!/bin/(ba)?sh' . | \
	xargs $$venv/bin/shellcheck --exclude=SC1091 && \
	echo "== lint: yamllint" && $$venv/bin/yamllint --strict docs policies debian units

lint-packages: setup ## lintian on the .deb files, ansible-lint on the role; part of test-all
	@tests/lint-packages

unit: setup ## pure tests: recorded hosts, cases, fault injection
	@echo "== unit tests" && tests/run tests/unit

netns: setup ## real devices and threads of this machine's kernel, in namespaces
	@echo "== netns tests" && tests/run tests/netns

kmod: ## the kernel module for every supported kernel: build, warnings, sparse, dkms; no boot
	@tests/lab/lab kmod

kmod-debug: setup ## the module on kernels with KASAN, lockdep and KCSAN (LAB_RANDOM=3600 seconds of random operations each, LAB_SEED)
	@LAB_MISTAKES=1 LAB_RANDOM=$${LAB_RANDOM:-3600} tests/run tests/lab/test_detectors.py tests/lab/test_lab.py -k "kasan or kcsan or mistakes"

lab: setup ## real KVM hosts of both Debian releases (LAB=bookworm-veth for one of them)
	@echo "== lab tests" && tests/run tests/lab $(if $(LAB),-k '$(LAB)')

pair: setup ## two linked lab hosts, tuned by the Ansible role; takes the whole machine
	@LAB_PAIR=1 tests/run tests/lab/test_pair.py

test: lint ## lint, then unit, browser, netns and the core tests in labs of both releases, one report
	@tests/browser/install || echo "no chromium: the browser tests will be skipped"
	@echo "== unit, browser, netns and core lab tests" && \
	LAB_TIER=core tests/run -m "not beyond" $(SUITE)

test-all: lint lint-packages ## hours: every test in every lab, every interruption point, and the pair
	@# RESUME=1 boots only the labs that have not passed on what they read now.
	@tests/browser/install || echo "no chromium: the browser tests will be skipped"
	@echo "== unit, browser, netns and all lab tests" && LAB_STRIDE=1 $(if $(RESUME),LAB_RESUME=1) tests/run $(SUITE)
	@$(MAKE) pair

browser: setup ## the status page in a real browser; installs Debian's chromium
	@tests/browser/install && echo "== browser tests" && tests/run tests/browser

screenshots: setup ## the pictures in docs/images, made anew; installs Debian's chromium
	@tests/browser/install && venv=$$(tests/setup) && $$venv/bin/python -B tests/screenshots/make.py

fuzz: setup ## every reader of foreign input under atheris (RUNS=10000 inputs each)
	@tests/fuzz/run

mutants: ## small changes of the code, each of which a unit test should notice (SAMPLE=300 SEED=1)
	@tests/mutants/run

demo: ## the main job on a real router guest in the lab
	@tests/lab/demo

soak: ## half an hour of traffic and changes on a lab host, the daemon watched (SOAK=seconds)
	@share=$$(tests/run --place)/trixie-soak && mkdir "$$share" && \
	tests/lab/lab run --release trixie --cpus 3 --timeout $$(($(or $(SOAK),1800) + 900)) \
	--share "$$share" -- env LAB_SOAK=$(or $(SOAK),1800) python3 -B -m pytest -q -s \
	-p no:cacheprovider --junitxml=/mnt/share/junit.xml /mnt/tests/lab/inside/test_churn.py::test_soak

events: setup ## what happens to a host in months, and how soon the daemon has seen it: docs/results/events.md
	@tests/lab/events.py

bottlenecks: setup ## limits made on purpose, and which `vsrtune top` names: docs/results/bottlenecks.md
	@tests/lab/bottlenecks.py

results: setup ## measure the papers' figures and the peers anew, and write docs/results
	@# RESUME=1 measures only what is missing; FIGURES=fig03,peers limits it to these.
	@venv=$$(tests/setup) && cd tests && $$venv/bin/python -m experiments \
	$(if $(FIGURES),--figures $(FIGURES)) $(if $(RESUME),,--again all)

.PHONY: docs
docs: setup ## the parts of docs/ that the code and test runs know: policy, metrics, promises, manual pages
	@# GREEN=1 records which promises' tests the last runs passed, GREEN=DIR those with reports there.
	@venv=$$(tests/setup) && cd docs && PYTHONPATH=.. PYTHONDONTWRITEBYTECODE=1 $$venv/bin/python \
	-m generate $(if $(GREEN),green $(abspath $(filter-out 1,$(GREEN))))

bench-scale: setup ## what many guests cost: synthetic hosts of 10, 100 and 1,000, writes docs/results/scale.md
	@venv=$$(tests/setup) && PYTHONPATH=. $$venv/bin/python -B tests/scale/bench.py

format: setup ## rewrite the sources as the linter wants them
	@venv=$$(tests/setup) && $$venv/bin/ruff format . && $$venv/bin/ruff check --fix .

clean: ## remove what the tests left in the tree
	rm -rf .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
