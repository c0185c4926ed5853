#!/bin/sh
# Make .venv exactly as requirements/cpu.lock says. Safe to interrupt and to repeat: a stamp is written last.
# Why --no-deps: some packages ask for others that do not import beside a CPU build of torch (docs/decisions/0003).
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
lock=requirements/cpu.lock
want=$(cat "$lock" pyproject.toml requirements/setup.sh | cksum | tr ' ' '-')
stamp=.venv/headrace-setup
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want@$(pwd)" ]; then exit 0; fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
  echo "setup: $python is missing or older than Python 3.11; name another one: make setup PYTHON=python3.12" >&2
  exit 2
}
free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
if [ ! -d .venv ] && [ "$free_kb" -lt 6000000 ]; then
  echo "setup: the environment needs about 5 GB and $(pwd) has $((free_kb / 1000000)) GB free" >&2
  exit 2
fi
started=$(date +%s)
echo "setup: making .venv from $lock (3.4 GB; about two minutes)"
rm -f "$stamp"
# A folder that was moved or half made has a python that does not run: start again.
if [ -d .venv ] && ! .venv/bin/python -m pip --version >/dev/null 2>&1; then rm -rf .venv; fi
[ -d .venv ] || "$python" -m venv .venv || {
  rm -rf .venv
  echo "setup: $python cannot make environments; on Debian and Ubuntu: apt-get install python3-venv" >&2
  exit 2
}
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

pip install -q "torch==$(sed -n 's/^torch==//p' "$lock")"
# The CUDA build of torch (plain PyPI) brings the triton that it was built with; then the lock's one is left out.
.venv/bin/python - "$lock" > .venv/headrace-lock <<'PY'
import importlib.metadata, sys
requires = importlib.metadata.requires("torch") or []
own = ("torch==", "triton==") if any(r.startswith("triton") and "extra" not in r for r in requires) else ("torch==",)
print("\n".join(line for line in open(sys.argv[1]).read().splitlines() if not line.startswith(own)))
PY
DS_BUILD_OPS=0 pip install -q --no-deps -r .venv/headrace-lock
pip install -q --no-deps --no-build-isolation -e .
.venv/bin/python -c 'import torch, vllm, ingest.events' >/dev/null || { echo "setup: the environment does not import; try: rm -rf .venv && make setup" >&2; exit 1; }
echo "$want@$(pwd)" > "$stamp"
echo "setup: done in $(($(date +%s) - started)) s"
