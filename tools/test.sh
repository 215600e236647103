#!/bin/sh
# Install ftd with its test tools into .venv (made if it is not there) and run every check.
# Arguments go to pytest: sh tools/test.sh tests/kv -k evict
set -eu
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || python3 -m venv .venv
# A machine without a GPU takes the CPU builds; elsewhere torch comes with its own triton.
if command -v nvidia-smi >/dev/null 2>&1; then
    .venv/bin/pip install -q -e '.[test,clients]'
else
    .venv/bin/pip install -q -c constraints/cpu.txt -e '.[test,clients,interpreter]'
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile "$@"
