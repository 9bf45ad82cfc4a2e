#!/usr/bin/env bash
# Engine: train on several machines. Start the same command on each of them.
#
# Usage: NNODES=2 RDZV_ENDPOINT=node0:29500 \
#          launch/node.sh [--dry-run] [--debug] [--config FILE] [--SETTING VALUE …]
#   --dry-run         print what would be run, and the variables that are set, and end
#   --debug           let PyTorch tell what the processes do together
# Variables; what you set yourself stays as it is:
#   NNODES            machines (default: 1), or MIN:MAX where they may come and go
#   RDZV_ENDPOINT     HOST:PORT of one machine, a port that all can reach
#   RDZV_ID           name of this run, the same on all machines (default: the project's name)
#   NODE_RANK         number of this machine, from 0 at HOST: all are then counted out beforehand
#   JOIN_TIMEOUT_S    seconds to wait for the other machines (default: 300)
#   NPROC             processes on this machine (default: the visible GPUs, or 1)
#   OMP_NUM_THREADS   CPU threads of each process (default: the CPUs, shared out)
#   MAX_RESTARTS      how often all processes are started again after a failure
#                     (default: 0, and 10 where machines may come and go)
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds to save in after a signal (default: 600)
set -euo pipefail

package=demo

# Words for this script itself; the others are settings of the program.
dry_run="" debug="" settings=()
for word in "$@"; do
  case $word in
    --dry-run) dry_run=yes ;;
    --debug) debug=yes ;;
    *) settings+=("$word") ;;
  esac
done

# Sets a variable, unless it has come set from outside, and notes it for the list that `run` prints.
given=()
give() {
  if [[ -z "${!1+set}" ]]; then
    printf -v "$1" '%s' "$2"
  fi
  export "${1?}"
  given+=("$1=${!1}")
}

# Says what it is about to run, then does so in place of this script.
run() {
  printf '%s\n' "${given[@]}" "$(printf '%q ' "$@")" >&2
  [[ -n "$dry_run" ]] || exec "$@"
}

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
processes=${NPROC:-$(visible_gpus)}
if ((processes < 1)); then
  processes=1
fi

# Each process takes its share of the CPUs that this shell may use.
cpus=$(OMP_NUM_THREADS="" nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
cpus=${SLURM_CPUS_PER_TASK:-$cpus} # SLURM may leave the others in sight
threads=$((cpus / processes))
give OMP_NUM_THREADS $((threads > 0 ? threads : 1))

if [[ -n "$debug" ]]; then
  give TORCH_DISTRIBUTED_DEBUG DETAIL
  give TORCH_CPP_LOG_LEVEL INFO
fi

# The package is found from any working directory, installed or not.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# Signals reach the processes, which save and leave: torchrun waits so long before it kills them.
torchrun_file=$(python -c 'from importlib.util import find_spec; print(find_spec("torch").origin)')
options=()
if grep -q "signals.to.handle" "${torchrun_file%/*}/distributed/run.py"; then
  options+=(--signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
fi
give TORCH_ELASTIC_SHUTDOWN_TIMEOUT 600
# A restart would meet addresses in the launcher's store that the processes before have left there.
give TORCH_DISABLE_SHARE_RDZV_TCP_STORE 1

nodes=${NNODES:-1}
if [[ "$nodes" != 1 && -z "${RDZV_ENDPOINT:-}" ]]; then
  echo "NNODES=$nodes needs RDZV_ENDPOINT=HOST:PORT of one machine, the same on all of them" >&2
  exit 2
fi
restarts=0
if [[ "$nodes" == *:* ]]; then
  restarts=10 # the loss of a machine is one
fi

# A machine alone meets nobody, and takes a free port; its own name may lead nowhere.
meeting=(--standalone --local-addr 127.0.0.1)
if [[ "$nodes" != 1 ]]; then
  id=${RDZV_ID:-$package}
  give JOIN_TIMEOUT_S 300
  # How this machine reaches the one at which all meet.
  limit=$JOIN_TIMEOUT_S
  [[ -z "$dry_run" ]] || limit=""
  facts=$(python -m "$package.engine.nodes" "$RDZV_ENDPOINT" "$id" "$limit" \
    ${settings[@]+"${settings[@]}"}) || exit
  read -r address is_host interface <<<"$facts"
  if [[ -n "$interface" ]]; then
    give GLOO_SOCKET_IFNAME "$interface"
  fi
  meeting=(--nnodes "$nodes" --rdzv-id "$id" --local-addr "$address")
  if [[ -n "${NODE_RANK:-}" ]]; then
    meeting+=(
      --node-rank "$NODE_RANK" --master-addr "${RDZV_ENDPOINT%:*}"
      --master-port "${RDZV_ENDPOINT##*:}" --rdzv-conf "timeout=$JOIN_TIMEOUT_S"
    )
  else
    limits=join_timeout=$JOIN_TIMEOUT_S,read_timeout=60,last_call_timeout=5
    meeting+=(
      --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-conf "$limits,is_host=$is_host"
    )
  fi
fi

# It is torchrun, and says in a line why machines do not meet.
run python -m "$package.engine.agent" "${meeting[@]}" --nproc-per-node "$processes" \
  --max-restarts "${MAX_RESTARTS:-$restarts}" \
  ${options[@]+"${options[@]}"} \
  -m "$package.train" ${settings[@]+"${settings[@]}"}
