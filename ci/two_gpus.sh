#!/usr/bin/env bash
# What a second GPU brings: `ci/two_gpus.sh NAME...` checks implementations on a Ray cluster that is
# this machine, with two GPUs and with one, and compares the times with the simulation's. A first
# run, with both, compiles what there is to compile.
# Options of `kernelproof check` may follow the names. A run whose report is there is not repeated.
set -euo pipefail
python=${PYTHON:-.venv/bin/python} folder=${FOLDER:-.kernelproof/two-gpus}
device=${DEVICE:-cuda} port=${PORT:-6379} # DEVICE=cpu: two cores, and one
address=127.0.0.1:$port
# A token that Ray finds in ~/.ray is asked for by the cluster, and not sent to an address.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-disabled}
mkdir -p "$folder"

# Start a cluster of so many GPUs, and check on it: run GPUS REPORT ARGUMENTS...
run() {
  local gpus=$1 report=$2 count=gpus code=0
  shift 2
  [ -e "$report" ] && return
  [ "$device" = cpu ] && count=cpus
  "$python" -m ray.scripts.scripts start --head --port="$port" \
    "--num-$count=$gpus" --include-dashboard=false --object-store-memory=200000000 \
    --disable-usage-stats --block >"$folder/ray.log" 2>&1 &
  head=$!
  trap 'kill "$head"' EXIT
  until (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    kill -0 "$head" 2>/dev/null || { cat "$folder/ray.log" >&2 && exit 3; }
    sleep 1
  done
  # --jobs 1: few implementations do not fill more places.
  "$python" -m kernelproof check "$@" --profile gate --device "$device" --jobs 1 --seed 1 \
    --minutes 60 --cases "$folder/cases" --json "$report" --ray "$address" || code=$?
  case $code in 0 | 1 | 4) ;; *) exit "$code" ;; esac # findings are no matter here
  kill "$head"
  wait "$head" || true
  trap - EXIT
}

run 2 "$folder/first.json" "$@"
costs=$folder/cases/costs/gate-$device.json # with these, both draw the same problems
run 2 "$folder/two.json" "$@" --costs "$costs"
run 1 "$folder/one.json" "$@" --costs "$costs"

"$python" - "$folder" <<'PYTHON'
import json
import pathlib
import sys

one, two = (json.loads(pathlib.Path(sys.argv[1], f"{name}.json").read_text())
            for name in ("one", "two"))
print(f"one GPU {one['seconds']:.1f} s, {one['judged']} problems; two GPUs {two['seconds']:.1f} s, "
      f"{two['judged']} problems: {one['seconds'] / two['seconds']:.2f} times as fast")
PYTHON
"$python" "$(dirname "$0")/../tests/bench/fleet_simulation.py" "$folder/one.json" --gpus 2 --measured "$folder/two.json"
