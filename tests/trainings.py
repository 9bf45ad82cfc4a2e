"""Train a rendered project through its own harness; as a program, print as JSON what came out.

    python trainings.py PACKAGE RANKS [SETTING=VALUE …]

The project must be on PYTHONPATH. Only the standard library and what it needs itself are imported,
so that this runs on a machine without the generator.
"""

import contextlib
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

EPOCHS = 2
STOP = 30
"""Steps of the run that stops: in the middle of the second epoch."""

# What each example needs to be trained in seconds: 40 or 46 steps in two epochs, of which the
# 30th is in the middle of the second.
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {},
    "bytes": {
        "data__train_bytes": 79 * 512 + 1,
        "data__valid_bytes": 20 * 512 + 1,
        "model__layers": 1,
        "model__dropout": 0.1,
        "global_batch_size": 4,
    },
}

# Several micro-batches for each step of two ranks, and in the last of an epoch fewer.
MICRO = {"digits": 8, "bytes": 1}

# How far the loss must have fallen then, as a share of the first.
FALLS_TO = {"digits": 0.7, "bytes": 0.9}


def settings_of(answers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Give the settings that a project of these answers is trained with, `more` among them."""
    settings = {"data__num_workers": 0, **SETTINGS[answers["example"]], **more}
    micro = {"micro_batch_size": MICRO[answers["example"]]} if answers["accumulation"] else {}
    return settings | micro


def main(package: str, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train from start to end, then the same again in two parts."""
    start = time.monotonic()
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
        valid = scenario.read_metrics(straight.run_dir, "valid")[-1]
        log = Path(config.run_dir, "logs", "rank0.log").read_text()
    num_samples = len(import_module(f"{package}.data").build_datasets(config.data)[0])
    return {
        "windows": EPOCHS * math.ceil(num_samples / config.global_batch_size),
        "samples": EPOCHS * num_samples,
        "progress": whole[0].progress,
        "stopped": part[0].progress,
        "resumed_from": re.findall(r"resumed from (\S+):", log),
        "losses": losses[0],
        "losses_in_parts": losses[1],
        "valid": {name: valid[name] for name in ("loss", "accuracy") if name in valid},
        "weights_are_equal": all(
            torch.equal(tensor, rank.parameters[name])
            for rank in whole
            for name, tensor in whole[0].parameters.items()
        ),
        "digests": [rank.digest for rank in whole],
        "digests_in_parts": [rank.digest for rank in rest],
        "seconds": round(time.monotonic() - start, 1),
    }


def check(result: dict[str, Any], answers: Mapping[str, Any]) -> None:
    """Compare what came out with what was promised.

    Raises:
        AssertionError: with what is wrong.
    """
    progress, losses = result["progress"], result["losses"]
    lowest = FALLS_TO[answers["example"]] * losses[0]
    assert losses[-1] < lowest, f"the loss went from {losses[0]} to {losses[-1]}"
    assert result["weights_are_equal"], "the ranks' weights differ"
    assert progress["step"] + progress["skipped"] == result["windows"], "steps are missing"
    may_skip = answers["amp"] == "fp16"  # a loss scale is searched for
    assert progress["skipped"] == 0 or may_skip, "steps were left out"
    place = (progress["epoch"], progress["samples"])
    assert place == (EPOCHS, result["samples"]), "epochs or samples are missing"
    stopped = result["stopped"]
    assert stopped["step"] == STOP, "it did not stop where it should"
    assert stopped["position"] > 0, "it stopped between two epochs"
    assert len(result["resumed_from"]) == 1, "it did not resume"
    assert result["losses_in_parts"] == losses, "the resumed run had other losses"
    assert result["digests_in_parts"] == result["digests"], "the resumed run ended with other bits"


def value_of(word: str) -> Any:
    """Give the number that a word means, or the word."""
    with contextlib.suppress(ValueError):
        return json.loads(word)
    return word


if __name__ == "__main__":
    # Before torch is imported, here and in the server that forks the ranks.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    words = dict(word.split("=", 1) for word in sys.argv[3:])
    typed = {name: value_of(word) for name, word in words.items()}
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), typed)))
