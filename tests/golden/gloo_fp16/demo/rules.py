"""Shared: what the value of a setting must be, where its type lets nonsense through. No torch."""

import math
import multiprocessing
import re
from collections.abc import Callable
from typing import Any

from .engine.launch import Refused
from .settings import CHANGEABLE


def _is_init_method(value: str) -> bool:
    """Whether torch.distributed takes it for what it was meant."""
    if tcp := re.fullmatch(r"tcp://[^/?#;@\s]+:(\d+)", value):
        return 0 < int(tcp[1]) < 1 << 16
    return value == "env://" or re.fullmatch(r"file:///[^?#;]*[^?#;/]", value) is not None


# What is expected, of which settings, and a test of it. None was let through by the type.
_RULES: tuple[tuple[str, tuple[str, ...], Callable[[Any], bool]], ...] = (
    (
        "at least 1",
        (
            "epochs",
            "max_steps",
            "global_batch_size",
            "log_every",
            "eval_every",
            "save_every",
            "keep_checkpoints",
            "max_nonfinite_steps",
            "optim.base_batch_size",
            "ddp.powersgd_rank",
            "data.prefetch_factor",
        ),
        lambda value: value >= 1,
    ),
    (
        "more than 0",
        (
            "connect_timeout_s",
            "timeout_s",
            "watchdog_s",
            "optim.lr",
            "optim.grad_clip",
            "ddp.bucket_cap_mb",
        ),
        lambda value: value > 0 and math.isfinite(value),
    ),
    (
        "0 or more",
        ("optim.weight_decay", "optim.warmup_steps", "data.num_workers"),
        lambda value: value >= 0 and math.isfinite(value),
    ),
    ("between 0 and 1", ("optim.min_lr_ratio",), lambda value: 0 <= value <= 1),
    (
        "env://, tcp://HOST:PORT or file:///PATH",
        ("rendezvous.init_method",),
        _is_init_method,
    ),
    ("the name of a directory", ("run_dir",), lambda value: bool(value.strip())),
    (
        "a type without a number, such as cpu (each rank takes the device of its own number)",
        ("device",),
        lambda value: value.isidentifier(),
    ),
    (
        f"one of {', '.join(multiprocessing.get_all_start_methods())} on this platform",
        ("data.multiprocessing_context",),
        lambda value: value in multiprocessing.get_all_start_methods(),
    ),
)


# What a resumed run says of a setting that is not the checkpoint's; nothing where that has no part
# in the numbers. Your own, `model.…` and `data.…`, must be the same unless CHANGEABLE names them.
CHANGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "",
        (
            "run_dir",
            "resume",
            "max_steps",
            "log_every",
            "eval_every",
            "save_every",
            "keep_checkpoints",
            "on_nonfinite",
            "max_nonfinite_steps",
            "connect_timeout_s",
            "timeout_s",
            "watchdog_s",
            "data.num_workers",
            "data.prefetch_factor",
            "data.multiprocessing_context",
            "rendezvous.init_method",
            "rendezvous.rank",
            "rendezvous.world_size",
            "rendezvous.local_rank",
            "rendezvous.local_world_size",
        ),
    ),
    ("weights and moments are converted", ("dtype",)),
    (
        "numbers are equal within rounding",
        (
            "channels_last",
            "tf32",
            "optim.fused",
            "ddp.bucket_cap_mb",
            "ddp.static_graph",
            "ddp.find_unused_parameters",
            "ddp.gradient_as_bucket_view",
        ),
    ),
    (
        "numbers are equal within rounding, and only without dropout and BatchNorm",
        (
            "device",
            "compile",
        ),
    ),
    ("order, augmentation and dropout are drawn anew", ("seed",)),
    (
        "the learning rate follows from it, from this step on",
        (
            "epochs",
            "optim.lr",
            "optim.schedule",
            "optim.warmup_steps",
            "optim.min_lr_ratio",
            "optim.scale_lr",
            "optim.base_batch_size",
        ),
    ),
    (
        "a step is another number of samples, and the schedule another number of steps",
        ("global_batch_size",),
    ),
    (
        "it holds from this step on",
        (
            "optim.weight_decay",
            "optim.grad_clip",
            "ddp.comm_hook",
            "ddp.powersgd_rank",
        ),
    ),
)


def meaning_of_change(key: str) -> str | None:
    """What it means to resume with another value; empty: nothing. None: that is refused."""
    for words, keys in CHANGES:
        if key in keys:
            return words
    is_yours = key.startswith(("model.", "data."))
    return None if is_yours and key not in CHANGEABLE else "it holds from this step on"


def check_values(config: object) -> None:
    """Refuse a setting whose value can't work, whatever the others are.

    Raises:
        Refused: the first one, in one line: the key, what was expected, what was got.
    """
    for expected, keys, is_right in _RULES:
        for key in keys:
            value: Any = config
            for name in key.split("."):
                value = getattr(value, name)
            if value is not None and not is_right(value):
                raise Refused(f"{key}: expected {expected}, got {value!r}")
