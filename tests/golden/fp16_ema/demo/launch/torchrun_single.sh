#!/usr/bin/env bash
# Engine: train on this machine, one process for each visible GPU.
#
# Usage: launch/torchrun_single.sh [--config FILE] [--SETTING VALUE …]
#   NPROC_PER_NODE    processes (default: the visible GPUs, or 1)
#   OMP_NUM_THREADS   CPU threads of each process (default: the CPUs, shared out)
#   MAX_RESTARTS      how often all processes are started again after a failure (default: 0)
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds to save in after a signal (default: 600)
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

# Signals reach the processes, which save and leave: torchrun waits so long before it kills them.
torchrun_file=$(python -c 'from importlib.util import find_spec; print(find_spec("torch").origin)')
options=()
if grep -q "signals.to.handle" "${torchrun_file%/*}/distributed/run.py"; then
  options+=(--signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# A restart would meet addresses in the launcher's store that the processes before have left there.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

# --standalone picks a free port: several runs can share the machine.
exec torchrun --standalone --nproc-per-node "$processes" --max-restarts "${MAX_RESTARTS:-0}" \
  ${options[@]+"${options[@]}"} \
  -m demo.train "$@"
