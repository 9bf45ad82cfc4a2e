# Signals reach the processes, which save and leave: torchrun waits so long before it kills them.
torchrun_file=$(python -c 'from importlib.util import find_spec; print(find_spec("torch").origin)')
options=()
if grep -q "signals.to.handle" "${torchrun_file%/*}/distributed/run.py"; then
  options+=(--signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
fi
give TORCH_ELASTIC_SHUTDOWN_TIMEOUT 600
# A restart would meet addresses in the launcher's store that the processes before have left there.
give TORCH_DISABLE_SHARE_RDZV_TCP_STORE 1
