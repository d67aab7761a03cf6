#!/bin/bash
# A cluster for one job of Slurm: `sbatch slurm.sh`. Yours to change: the features by which your nodes
# are found, how many of each, and the environment. The chip is that of each node's GPU.
#SBATCH --job-name=kernelproof
#SBATCH --nodes=4
#SBATCH --constraint="[h200*2&b200*2]"
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=04:00:00
set -euo pipefail

source .venv/bin/activate
export FLASHINFER_WORKSPACE_BASE=/tmp/kernelproof-modules # on each node's own disk
head=$SLURMD_NODENAME # this script runs on the first node
# Not `hostname --ip-address`: many nodes resolve their own name to 127.0.1.1. Where nodes have
# several networks, name the address by which the others reach this one.
ip=$(hostname --all-ip-addresses | cut -d' ' -f1)
address="$ip:6379"
join_seconds=${JOIN_SECONDS:-300}

# --exclusive, and a firewall between jobs, keep strangers out: Ray executes what any client sends.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  ray start --head --node-ip-address="$ip" --port=6379 --include-dashboard=false --block &

# Print how many nodes Ray has; 0 while none answers.
live() {
  timeout 60 python - "$address" <<'PYTHON' 2>/dev/null || echo 0
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))
PYTHON
}

# The gate asks once which machines there are: it would not use those that join later.
wait_for() {
  local nodes
  until nodes=$(live) && ((nodes >= $1)); do
    if ((SECONDS > join_seconds)); then
      echo "slurm.sh: $nodes of $SLURM_JOB_NUM_NODES nodes joined Ray in $join_seconds s" >&2
      exit 3
    fi
    sleep 2
  done
}

wait_for 1
if ((SLURM_JOB_NUM_NODES > 1)); then
  others=$((SLURM_JOB_NUM_NODES - 1))
  srun --nodes=$others --ntasks=$others --exclude="$head" \
    ray start --address="$address" --block &
fi
wait_for "$SLURM_JOB_NUM_NODES"

# A job that was killed goes on where it stopped.
kernelproof gate --device cuda --ray "$address" --resume --json all.json
