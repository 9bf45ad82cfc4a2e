# Signals reach the processes, which save and leave: torchrun waits so long before it kills them.
torchrun_file=$(python -c 'from importlib.util import find_spec; print(find_spec("torch").origin)')
options=()
if grep -q "signals.to.handle" "${torchrun_file%/*}/distributed/run.py"; then
  options+=(--signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
