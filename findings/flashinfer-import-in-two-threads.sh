#!/usr/bin/env bash
# flashinfer-python 0.7.2.post1 cannot be imported by two threads at once.
#
# One thread imports flashinfer.decode, another flashinfer.prefill, both for the first time. Python
# allows that: imports of one module wait for each other. FlashInfer's modules import each other in a
# circle (prefill -> trace.templates -> ... -> decode), so each thread holds a module that the other
# one needs. Seen with CPython 3.11, 5 of 5 times, on 2026-11-27: no hang, but neither import works:
#   flashinfer.decode:  _DeadlockError: deadlock detected by _ModuleLock('flashinfer.trace.templates')
#   flashinfer.prefill: ImportError: cannot import name 'BatchPrefillWithPagedKVCacheWrapper' from
#                       partially initialized module 'flashinfer.prefill'
# The same two imports one after the other work. An engine that loads its attention backends from a
# pool of threads has to import flashinfer in one of them first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --disable-pip-version-check install -qq "$@"; }
pip torch==2.13.0 apache-tvm-ffi click einops filelock ninja numpy nvidia-ml-py packaging requests tabulate tqdm
pip --no-deps flashinfer-python==0.7.2.post1

cat >"$folder/threads.py" <<'PYTHON'
import importlib
import sys
import threading

errors = {}


def load(name):
    try:
        importlib.import_module(name)
    except Exception as error:
        errors[name] = f"{type(error).__name__}: {error}"


names = ("flashinfer.decode", "flashinfer.prefill")
threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads:
    thread.start()
    if sys.argv[1] == "in turn":
        thread.join()
for thread in threads:
    thread.join()
print(*(f"{name}: {error}" for name, error in sorted(errors.items())), sep="\n")
sys.exit(bool(errors))
PYTHON

"$folder/venv/bin/python" "$folder/threads.py" "in turn" 2>/dev/null || { echo "changed: they fail in turn, too"; exit 1; }
# When the two threads meet is up to the machine: three tries, of which one has to show it.
for _ in 1 2 3; do
  if ! "$folder/venv/bin/python" "$folder/threads.py" "at once" >"$folder/said" 2>/dev/null; then
    cat "$folder/said"
    grep -q "_DeadlockError" "$folder/said" && exit 0
  fi
done
echo "changed: two threads can import flashinfer at once"
exit 1
