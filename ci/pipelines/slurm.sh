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
head=$(hostname)
address="$(hostname --ip-address | cut -d' ' -f1):6379"

# --exclusive, and a firewall between jobs, keep strangers out: Ray executes what any client sends.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  ray start --head --port=6379 --include-dashboard=false --block &
sleep 10
if ((SLURM_JOB_NUM_NODES > 1)); then
  others=$((SLURM_JOB_NUM_NODES - 1))
  srun --nodes=$others --ntasks=$others --exclude="$head" \
    ray start --address="$address" --block &
fi
sleep 20

# A job that was killed goes on where it stopped.
kernelproof gate --device cuda --ray "$address" --resume --json all.json
