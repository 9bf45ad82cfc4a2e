#!/usr/bin/env bash
# Engine: the launcher on one machine of a job, as train.sbatch lets srun start it.
#
# Usage: task.sh [--dry-run] [--debug] [--config FILE] [--SETTING VALUE …]
# Where a signal has come it ends with 0, for srun kills the others after anything else: they may
# still have to save.
set -euo pipefail

# With cgroups SLURM signals this script alone, else all that it has started: what comes twice is
# one signal. Every launcher understands TERM.
is_told=""
trap 'is_told=yes; kill -TERM "${program:-}" 2>/dev/null || true' TERM USR1

"${BASH_SOURCE[0]%/*}/node.sh" "$@" &
program=$!

while :; do
  code=0
  wait "$program" || code=$?
  kill -0 "$program" 2>/dev/null || break
done
[[ -z "$is_told" ]] || code=0
exit "$code"
