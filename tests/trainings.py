"""A program: train a rendered project through its own harness, and print as JSON what came out.

    python trainings.py PACKAGE RANKS [SETTING=VALUE …]

It is started in a project, with the project on PYTHONPATH. Only the standard library and what
the project itself needs are imported, so that it runs on a machine without the generator.
"""

import json
import math
import os
import sys
import tempfile
from functools import partial
from importlib import import_module
from typing import Any

EPOCHS = 2
STOP = 30
"""Steps of the run that stops: in the middle of the second epoch."""


def main(package: str, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train from start to end, then the same again in two parts."""
    # Both must stand before torch is imported, here and in the server that forks the ranks.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch = import_module("torch")
    config_class = import_module(f"{package}.config").Config
    scenario = import_module(f"{package}.tests.scenario")
    values = import_module(f"{package}.tests.harness").values

    prepare = None
    if settings["device"] != "cpu":
        prepare = partial(torch.use_deterministic_algorithms, True, warn_only=True)
    with tempfile.TemporaryDirectory() as directory:
        config = scenario.set_config(
            config_class(), run_dir=f"{directory}/parts", epochs=EPOCHS, log_every=1, **settings
        )
        straight = scenario.set_config(config, run_dir=f"{directory}/straight")
        stopping = scenario.set_config(config, max_steps=STOP)
        train = partial(values, scenario.run_training, ranks, timeout_s=300)
        whole = train(straight, prepare)
        part = train(stopping, prepare)
        rest = train(config, prepare)
        losses = [
            [line["loss"] for line in scenario.read_metrics(run.run_dir, "train")]
            for run in (straight, config)
        ]
    num_samples = len(import_module(f"{package}.data").build_datasets(config.data)[0])
    return {
        "windows": EPOCHS * math.ceil(num_samples / config.global_batch_size),
        "samples": EPOCHS * num_samples,
        "progress": whole[0].progress,
        "stopped": part[0].progress,
        "losses": losses[0],
        "losses_in_parts": losses[1],
        "weights_are_equal": all(
            torch.equal(tensor, rank.parameters[name])
            for rank in whole
            for name, tensor in whole[0].parameters.items()
        ),
        "digests": [rank.digest for rank in whole],
        "digests_in_parts": [rank.digest for rank in rest],
    }


def check(result: dict[str, Any], *, may_skip: bool) -> None:
    """Compare what came out with what was promised. `may_skip`: a loss scale is searched for."""
    progress, losses = result["progress"], result["losses"]
    assert losses[-1] < 0.7 * losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    assert result["weights_are_equal"], "the ranks' weights differ"
    assert progress["step"] + progress["skipped"] == result["windows"]
    assert progress["skipped"] == 0 or may_skip
    assert (progress["epoch"], progress["samples"]) == (EPOCHS, result["samples"])
    stopped = result["stopped"]
    assert stopped["step"] == STOP
    assert stopped["position"] > 0, "it stopped between two epochs"
    assert result["losses_in_parts"] == losses
    assert result["digests_in_parts"] == result["digests"], "the resumed run ended with other bits"


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[3:])
    typed = {name: int(word) if word.isdecimal() else word for name, word in words.items()}
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), typed)))
