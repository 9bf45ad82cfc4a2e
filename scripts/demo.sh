#!/usr/bin/env bash
# Render the default project into build/demo, train it on two CPU processes, show the result.
# Each call starts anew. `make demo` calls this with the tools of .venv first in PATH.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
slug=my_ddp_project
project=build/demo/$slug

rm -rf build/demo
mkdir -p build/demo
printf 'replay_dir: "%s"\n' "$PWD/build/demo" >build/demo/.cookiecutterrc

echo "== Rendering $project with the default answers"
cookiecutter . --no-input --config-file build/demo/.cookiecutterrc --output-dir build/demo |
  grep '^Answers'

echo "== Training it on two CPU processes: handwritten digits, real data, no download"
cd "$project"
NPROC=2 "$slug/launch/train.sh" \
  --config "$slug/configs/default.yaml" --device cpu

echo "== Result: from $project/runs/$slug/metrics.jsonl"
python - "runs/$slug/metrics.jsonl" <<'EOF_RESULT'
import json
import sys

with open(sys.argv[1]) as lines:
    last = [line for line in map(json.loads, lines) if line["split"] == "valid"][-1]
print(f"validation accuracy {last['accuracy']:.1%} after {last['step']} steps (promised: 97%)")
sys.exit(last["accuracy"] < 0.97)
EOF_RESULT

cat <<EOF_NEXT

== What next
  cd $project
  make install                 # in a virtual environment of the project's own
  make test                    # its tests, which you keep
  make debug                   # a few steps, without a launcher
  less $slug/train.py $slug/model.py
Your own project, with your answers:
  cd $(cd ../../.. && pwd) && .venv/bin/cookiecutter . --output-dir ..
EOF_NEXT
