#!/usr/bin/env bash
# Engine: train on several machines. Start the same command on each of them.
#
# Usage: NNODES=2 RDZV_ENDPOINT=node0:29500 \
#          launch/torchrun_multi.sh [--config FILE] [--SETTING VALUE …]
#   NNODES            machines (default: 1)
#   RDZV_ENDPOINT     HOST:PORT of one machine, a port that all can reach (default: localhost:29500)
#   RDZV_ID           name of this run, the same on all machines (default: the project's name)
#   NPROC_PER_NODE    processes on this machine (default: the visible GPUs, or 1)
#   OMP_NUM_THREADS   CPU threads of each process (default: the CPUs, shared out)
set -euo pipefail

package=demo

# One process for each GPU that this shell may use; without a GPU, one.
visible_gpus() {
  if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true
  elif command -v nvidia-smi >/dev/null; then
    { nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU' || true
  else
    echo 0
  fi
}
processes=${NPROC_PER_NODE:-$(visible_gpus)}
if ((processes < 1)); then
  processes=1
fi

# Each process takes its share of the machine's CPUs.
threads=$(($(getconf _NPROCESSORS_ONLN) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# The package is found from any working directory, installed or not.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

nodes=${NNODES:-1}
if ((nodes > 1)) && [[ -z "${RDZV_ENDPOINT:-}" ]]; then
  echo "NNODES=$nodes needs RDZV_ENDPOINT=HOST:PORT of one machine, the same on all of them" >&2
  exit 2
fi

# The time-outs, in seconds: how long to wait for the other machines, and for an answer.
exec torchrun \
  --nnodes "$nodes" \
  --nproc-per-node "$processes" \
  --rdzv-backend c10d \
  --rdzv-id "${RDZV_ID:-$package}" \
  --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:29500}" \
  --rdzv-conf join_timeout=300,read_timeout=60 \
  -m "$package.train" "$@"
