"""Engine: settings that are not those of the checkpoint. Imports no torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..config import Config
from ..rules import meaning_of_change
from .launch import Refused
from .manifest import Checkpoint


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings by their dotted keys."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changed(checkpoint: Checkpoint, config: Config) -> dict[str, tuple[Any, Any]]:
    """Each setting that is not the checkpoint's: its value there and now.

    One that only one of the two has, as after a part was rendered anew, is none of them.
    """
    saved = dict(flat(checkpoint.manifest.config))
    now = dict(flat(json.loads(json.dumps(asdict(config)))))  # as the manifest holds them
    both = [key for key in now if key in saved]
    return {key: (saved[key], now[key]) for key in both if saved[key] != now[key]}


def check_changes(checkpoint: Checkpoint, config: Config) -> None:
    """Refuse to go on with settings under which the checkpoint's weights mean something else.

    Raises:
        Refused: a setting of your model or your data is another one, and not changeable.
    """
    for key, (saved, now) in changed(checkpoint, config).items():
        if meaning_of_change(key) is None:
            raise Refused(
                f"{key}: expected {saved!r} as in the checkpoint {checkpoint.path.name}, got "
                f"{now!r}: give another run_dir, or name {key} in CHANGEABLE of settings.py"
            )


def tell_changes(checkpoint: Checkpoint, config: Config) -> Iterator[str]:
    """A line for each setting whose change has a part in the numbers: what it means."""
    for key, (saved, now) in changed(checkpoint, config).items():
        if words := meaning_of_change(key):
            yield f"{key} is {now!r}, and {saved!r} in the checkpoint: {words}"
