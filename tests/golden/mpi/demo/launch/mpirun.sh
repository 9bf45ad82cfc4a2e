#!/usr/bin/env bash
# Engine: train with Open MPI's mpirun.
#
# Usage: launch/mpirun.sh [--config FILE] [--SETTING VALUE …]
#   NPROC_PER_NODE    processes on this machine (default: the visible GPUs, or 1)
#   OMP_NUM_THREADS   CPU threads of each process (default: the CPUs, shared out)
set -euo pipefail

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

# PyTorch's record of the latest collectives, for a run that stands still; see the watchdog.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-${TMPDIR:-/tmp}/nccl_trace_rank_}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}

# The package is found from any working directory, installed or not.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# No binding: each process runs OMP_NUM_THREADS threads, and more where it loads data.
exec mpirun -np "$processes" --bind-to none python -m demo.train "$@"
