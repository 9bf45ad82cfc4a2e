#!/usr/bin/env bash
# Engine: train on several machines. Start the same command on each of them.
#
# Usage: NNODES=2 RDZV_ENDPOINT=node0:29500 \
#          launch/torchrun_multi.sh [--config FILE] [--SETTING VALUE …]
#   NNODES            machines (default: 1)
#   RDZV_ENDPOINT     HOST:PORT of one machine, a port that all can reach
#   RDZV_ID           name of this run, the same on all machines (default: the project's name)
#   NPROC_PER_NODE    processes on this machine (default: the visible GPUs, or 1)
#   OMP_NUM_THREADS   CPU threads of each process (default: the CPUs, shared out)
#   MAX_RESTARTS      how often all processes are started again after a failure (default: 0)
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds to save in after a signal (default: 600)
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

nodes=${NNODES:-1}
if ((nodes > 1)) && [[ -z "${RDZV_ENDPOINT:-}" ]]; then
  echo "NNODES=$nodes needs RDZV_ENDPOINT=HOST:PORT of one machine, the same on all of them" >&2
  exit 2
fi

# A machine alone meets nobody, and takes a free port.
meeting=(--standalone)
if ((nodes > 1)); then
  id=${RDZV_ID:-$package}
  # How this machine reaches the one at which all meet. What you have set yourself stays.
  facts=$(python -m "$package.engine.nodes" "$RDZV_ENDPOINT" "$id") || exit 2
  read -r address is_host interface <<<"$facts"
  if [[ -n "$interface" ]]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
  fi
  # In seconds: how long to wait for the other machines, and for an answer.
  limits=join_timeout=300,read_timeout=60
  meeting=(
    --nnodes "$nodes" --rdzv-backend c10d --rdzv-id "$id" --rdzv-endpoint "$RDZV_ENDPOINT"
    --rdzv-conf "$limits,is_host=$is_host" --local-addr "$address"
  )
fi

# A restart would meet addresses in the launcher's store that the processes before have left there.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

exec torchrun "${meeting[@]}" --nproc-per-node "$processes" --max-restarts "${MAX_RESTARTS:-0}" \
  ${options[@]+"${options[@]}"} \
  -m "$package.train" "$@"
