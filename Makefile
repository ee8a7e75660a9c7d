# Two commands do all the set-up: `make app` and `make test`. PIP_ARGS passes extra arguments to pip, for
# example a wheel index for the CPU build of torch.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
ONLY ?=
BIN := .venv/bin

# Threads that wait sleep instead of spinning: on shared cores spinning costs far more than it saves.
app lab test: export GOMP_SPINCOUNT ?= 0

.PHONY: app lab test notebooks bench lock

app: .venv/ready
	$(BIN)/streamlit run app

lab: .venv/ready
	$(BIN)/jupyter lab notebooks

# Lessons are compared beside the tests, each on one core; what they print follows at the end.
test: export OMP_NUM_THREADS ?= 1
test: .venv/ready
	$(BIN)/ruff check .
	@$(BIN)/pytest --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/sanitize.cfg notebooks \
	  > .venv/lessons.log 2>&1 & lessons=$$!; $(BIN)/pytest; tests=$$?; \
	wait $$lessons; lessons=$$?; cat .venv/lessons.log; exit $$((tests || lessons))

notebooks: .venv/ready
	$(BIN)/python notebooks/build.py

bench: .venv/ready
	$(BIN)/python -m kvlab bench --only "$(ONLY)"

.venv/ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "kvlab needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	$(BIN)/python -m kvlab get-model smollm2 || echo "kvlab: SmolLM2 is not here; the small embedded model is. Later: $(BIN)/python -m kvlab get-model"
	touch $@

# A fresh resolve of pyproject.toml, written down without local version labels such as +cpu.
lock:
	rm -rf .venv/lock && $(PYTHON) -m venv .venv/lock
	.venv/lock/bin/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) '.[dev]'
	.venv/lock/bin/python -m pip freeze --exclude kvlab | grep -viE '^(nvidia|cuda|triton|-e )' | sed -E 's/\+[A-Za-z0-9.]+$$//' > constraints.txt
	echo 'triton==3.7.1; platform_system == "Linux"' >> constraints.txt
	rm -rf .venv/lock
