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
{% if cookiecutter.cluster == "slurm" %}
cpus=${SLURM_CPUS_PER_TASK:-$cpus} # SLURM may leave the others in sight
{% endif %}
threads=$((cpus / processes))
give OMP_NUM_THREADS $((threads > 0 ? threads : 1))

{% if cookiecutter.backend != "gloo" %}
# PyTorch's record of the latest collectives, for a run that stands still; see the watchdog.
give TORCH_FR_BUFFER_SIZE 2000
give TORCH_FR_DUMP_TEMP_FILE "${TMPDIR:-/tmp}/nccl_trace_rank_"
give TORCH_NCCL_DUMP_ON_TIMEOUT 1
{% endif %}
if [[ -n "$debug" ]]; then
  give TORCH_DISTRIBUTED_DEBUG DETAIL
  give TORCH_CPP_LOG_LEVEL INFO
  {% if cookiecutter.backend != "gloo" %}
  give NCCL_DEBUG INFO
  {% endif %}
fi

# The package is found from any working directory, installed or not.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
