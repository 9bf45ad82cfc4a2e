"""The six named variants: snapshots of them are kept, and they run through the command line.

Together they hold every answer that can be rendered (`test_golden.py` checks it).
"""

from tests.rendering import Answers

VARIANTS: dict[str, Answers] = {
    "default": {},
    "bare": {
        "backend": "gloo",
        "amp": "off",
        "accumulation": False,
        "tracker": "none",
        "ci": "none",
    },
    "fp16_ema": {"amp": "fp16", "ema": True, "ci": "gitlab"},
    "multi": {"nodes": "multi", "accumulation": False, "ema": True, "tracker": "wandb"},
    "gloo_fp16": {
        "backend": "gloo",
        "nodes": "multi",
        "amp": "fp16",
        "accumulation": False,
        "tracker": "mlflow",
        "ci": "gitlab",
    },
    "mpi": {"backend": "mpi", "amp": "off", "ema": True, "tracker": "none"},
}
