# Everything a developer or CI runs. `make demo` and `make test` set up what they need.
.DEFAULT_GOAL := help
.PHONY: help setup lint unit netns kmod lab test demo results format clean
SHELL := /bin/bash

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "%-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Debian packages and the development environment, outside the tree
	@tests/setup >/dev/null

lint: setup ## ruff and mypy --strict
	@venv=$$(tests/setup) && \
	echo "== lint: ruff" && $$venv/bin/ruff check . && $$venv/bin/ruff format --check . && \
	echo "== lint: mypy --strict" && $$venv/bin/mypy

unit: setup ## pure tests: recorded hosts, cases, fault injection
	@venv=$$(tests/setup) && echo "== unit tests" && $$venv/bin/python -m pytest -q -rs tests/unit

netns: setup ## real devices and threads of this machine's kernel, in namespaces
	@venv=$$(tests/setup) && echo "== netns tests" && $$venv/bin/python -m pytest -q -rs tests/netns

kmod: ## the kernel module for every supported kernel: build, warnings, sparse, dkms; no boot
	@tests/lab/lab kmod

lab: setup ## real KVM hosts of both Debian releases (LAB=bookworm-veth for one of them)
	@venv=$$(tests/setup) && echo "== lab tests" && \
	$$venv/bin/python -m pytest -q -rs tests/lab $(if $(LAB),-k $(LAB))

test: lint ## everything: lint, then unit, netns and lab tests in one report
	@venv=$$(tests/setup) && echo "== unit, netns and lab tests" && \
	$$venv/bin/python -m pytest -q -rs tests/unit tests/netns tests/lab

demo: ## the main job on a real router guest in the lab
	@tests/lab/demo

results: setup ## measure the papers' figures and the peers anew, and write docs/results
	@# RESUME=1 measures only what is missing; FIGURES=fig03,peers limits it to these.
	@venv=$$(tests/setup) && cd tests/lab && $$venv/bin/python -m results \
	$(if $(FIGURES),--figures $(FIGURES)) $(if $(RESUME),,--again all)

format: setup ## rewrite the sources as the linter wants them
	@venv=$$(tests/setup) && $$venv/bin/ruff format . && $$venv/bin/ruff check --fix .

clean: ## remove what the tests left in the tree
	rm -rf .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
