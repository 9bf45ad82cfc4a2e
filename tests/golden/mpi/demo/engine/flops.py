"""Engine: what a run computes in a second, by the task's own count of a sample's operations."""

from .state import Job


class Flops:
    """Turns samples per second into operations, as far as the task counts them.

    A task that does has `flops_per_sample(config.model)`: those that its forward and backward
    need, not those that were done twice. So `mfu` is the model FLOPs utilisation of Chowdhery et
    al., PaLM, appendix B.
    """

    def __init__(self, task: object, job: Job) -> None:
        count = getattr(task, "flops_per_sample", None)
        self._tera = count(job.config.model) / 1e12 if count else None
        self._targets = getattr(task, "TARGETS_PER_SAMPLE", None)
        peak = job.config.peak_tflops
        self._peak = peak * job.world.world_size if peak else None

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """`targets_per_s` and `tflops`, over all ranks; `mfu`, the share of `peak_tflops`."""
        if self._tera is None:
            return {}
        rates = {"tflops": samples_per_s * self._tera}
        if self._targets:
            rates["targets_per_s"] = samples_per_s * self._targets
        if self._peak:
            rates["mfu"] = rates["tflops"] / self._peak
        return rates
