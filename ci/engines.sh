#!/usr/bin/env bash
# The Python files of engines' wheels: engines.sh PYTHON FOLDER REQUIREMENT... (vllm==0.33.0).
# Each release gets a folder of its own. Nothing of a wheel is run, so one of any platform and
# Python will do; it is deleted afterwards.
set -euo pipefail
python=$1 folder=$2
shift 2

for engine in "$@"; do
  target=$folder/${engine/==/-}
  [ -d "$target" ] && { echo "engines: $target is there"; continue; }
  fetched=$(mktemp -d)
  trap 'rm -rf "$fetched"' EXIT
  echo "engines: fetching the wheel of $engine"
  "$python" -m pip --disable-pip-version-check download -q --no-cache-dir --progress-bar off \
    --no-deps --only-binary :all: --implementation cp --python-version 3.11 --abi cp311 \
    --abi abi3 --abi cp38 --abi none --platform manylinux_2_34_x86_64 \
    --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \
    --platform manylinux1_x86_64 --platform any --dest "$fetched" "$engine"
  "$python" - "$fetched" "$target.part" <<'PYTHON'
import pathlib
import sys
import zipfile

folder, target = map(pathlib.Path, sys.argv[1:])
kept = (".py", ".dist-info/METADATA")
for path in folder.glob("*.whl"):
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(target, [name for name in wheel.namelist() if name.endswith(kept)])
PYTHON
  mv "$target.part" "$target"
  rm -rf "$fetched"
  echo "engines: $target has $(find "$target" -name '*.py' | wc -l) Python files"
done
