"""Engine: a run that stops and goes on ends with the same bits as one that did not stop."""

import pytest

from ..config import Config
from .harness import values
from .scenario import run_training, set_config

CONFIG = set_config(
    Config(), device="cpu", epochs=2, log_every=5, data__num_workers=0, global_batch_size=192
)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stopped_in_an_epoch_and_resumed_is_bit_exact(run_dir: str, world_size: int) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    straight = values(run_training, world_size, set_config(config, run_dir=run_dir + "-straight"))
    values(run_training, world_size, set_config(config, max_steps=5))
    resumed = values(run_training, world_size, config)
    assert [rank.digest for rank in resumed] == [rank.digest for rank in straight]
