"""Engine: all ranks write together, beside the training, and only what is whole is seen."""

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ..engine.choice import newest
from ..engine.launch import Refused
from ..engine.manifest import manifest_text, read_checkpoint
from ..engine.reading import part_names, read_part
from ..engine.strategy import Checkpointer, own_share
from .harness import values
from .parts import joined
from .test_strategy import KEEP, save_weights
from .toy import Toy, put

TOY = Toy(depth=3, has_batch_norm=True)


def begin_without_shared_disk(init_method: str, roots: list[str]) -> str:
    """What a rank hears that sees a disk of its own."""
    with joined(init_method) as job:
        os.chdir(roots[job.world.rank])
        try:
            Checkpointer(Path(), job.world, KEEP)
        except Refused as error:
            return str(error)
    return "begun"


def test_disks_of_their_own_are_refused(tmp_path: Path) -> None:
    roots = [str(tmp_path / name) for name in "ab"]
    for root in roots:
        Path(root).mkdir()
    heard = values(begin_without_shared_disk, 2, roots)
    assert heard[0] == heard[1]
    assert heard[0].startswith("run_dir: expected a directory that all ranks share, got ")
    assert values(begin_without_shared_disk, 2, roots[:1] * 2) == ["begun", "begun"]
    assert list(tmp_path.glob("*/*")) == [], "what tells the disks apart is gone"


def share(init_method: str) -> dict[tuple[str, str], int]:
    """The tensors that a rank would write, with their sizes in bytes."""
    with joined(init_method, TOY) as job:
        parts = own_share(job.state, job.world)
        return {
            (part, name): tensor.nbytes
            for part, tensors in parts.items()
            for name, tensor in tensors.items()
        }


def test_each_tensor_is_written_once_and_rank_0_writes_its_buffers() -> None:
    ranks = values(share, 3)
    written = [key for rank in ranks for key in rank]
    assert sorted(written) == sorted(values(share, 1)[0])
    assert all("running_mean" not in name for rank in ranks[1:] for _, name in rank)
    loads = [sum(rank.values()) for rank in ranks]
    largest = max(size for rank in ranks for size in rank.values())
    assert max(loads) - min(loads) <= 2 * largest


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    values(save_weights, 3, str(tmp_path), 7, TOY)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    for part in set(part_names(checkpoint)) - {"optimizer"}:
        weights = read_part(checkpoint, part)
        assert weights["layers.1.running_mean"].eq(0).all()  # filled with the number of the rank
    assert read_part(checkpoint, "model")["layers.0.weight"].eq(7).all()


def train_while_saving(init_method: str, root: str) -> tuple[bool, bool, list[str]]:
    """Use the default group, as training does, while a slow save is under way.

    Whether it was still under way afterwards and nothing was seen of it, and what was seen then.
    """
    write = FileSystemWriter.write_data

    def slow_write(*arguments: Any) -> Any:
        time.sleep(1.0)
        return write(*arguments)

    put(FileSystemWriter, write_data=slow_write)
    with joined(init_method, TOY) as job:
        checkpointer = Checkpointer(Path(root), job.world, KEEP)
        job.state.progress.step = 1
        start = time.perf_counter()
        checkpointer.save(job, None)
        total = torch.zeros(1)
        for _ in range(200):
            total += 1
            dist.all_reduce(total)
            total /= job.world.world_size
        seen = [*Path(root).glob("step_*[0-9]"), *Path(root).glob("*/manifest.json")]
        is_early = time.perf_counter() - start < 1.0
        checkpointer.finish()
        names = sorted(path.name for path in Path(root).iterdir())
        return is_early and not seen, total.item() == 200, names


def test_training_goes_on_and_nothing_is_seen_before_it_is_whole(tmp_path: Path) -> None:
    for is_hidden, is_right, names in values(train_while_saving, 2, str(tmp_path)):
        assert is_hidden
        assert is_right
        assert names == ["step_00000001"]


def change_while_saving(init_method: str, root: str) -> list[float]:
    """Save many times, and change all weights at once after each; what was saved at each step."""
    with joined(init_method, Toy(depth=20)) as job:
        checkpointer = Checkpointer(Path(root), job.world, KEEP)
        for step in range(1, 21):
            job.state.progress.step = step
            for parameter in job.state.module.parameters():
                torch.nn.init.constant_(parameter, step)
            checkpointer.save(job, None)
        checkpointer.finish()
    saved = [read_checkpoint(path, verify=True) for path in sorted(Path(root).iterdir())]
    names = [name for name, _ in job.state.module.named_parameters()]
    weights = [read_part(checkpoint, "model") for checkpoint in saved]
    assert all(tensors[name].unique().numel() == 1 for tensors in weights for name in names)
    return [tensors[names[0]].mean().item() for tensors in weights]


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    assert values(change_while_saving, 2, str(tmp_path)) == [list(range(1, 21))] * 2


def fail_in_the_thread(init_method: str, root: str) -> list[str]:
    """What a rank hears at each of three saves when rank 1 could not write the first."""
    with joined(init_method, TOY) as job:
        write = FileSystemWriter.write_data

        def failing(writer: Any, *arguments: Any) -> Any:
            if job.world.rank == 1 and "step_00000001" in str(writer.path):
                raise OSError(28, "No space left on device")
            return write(writer, *arguments)

        put(FileSystemWriter, write_data=failing)
        checkpointer = Checkpointer(Path(root), job.world, KEEP)
        heard = []
        for step in (1, 2):
            job.state.progress.step = step
            try:
                checkpointer.save(job, None)
                heard.append("begun")
            except OSError as error:
                heard.append(str(error))
        return heard


def test_failure_comes_up_at_the_next_save_and_leaves_nothing(tmp_path: Path) -> None:
    heard = values(fail_in_the_thread, 2, str(tmp_path))
    assert heard[0] == heard[1]
    assert heard[0][0] == "begun"
    assert heard[0][1].startswith("the checkpoint of step 1 was not written: ")
    assert "No space left on device" in heard[0][1]
    assert list(tmp_path.iterdir()) == []


class Harmful:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


def read_harmful(_: str, directory: str) -> str:
    """What is said of a checkpoint whose metadata would run a command."""
    os.chdir(directory)
    path = Path("step_00000007")
    (path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    checkpoint = read_checkpoint(path, verify=False)
    try:
        read_part(checkpoint, "model")
    except Refused as error:
        return str(error)
    return "read"


def test_metadata_can_run_no_code(tmp_path: Path) -> None:
    values(save_weights, 1, str(tmp_path), 7, TOY)
    manifest = tmp_path / "step_00000007" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["sha256"]
    for file in content["files"]:
        if file["name"] == ".metadata":
            file["size"] = len(pickle.dumps(Harmful()))
    manifest.write_text(manifest_text(content))
    (heard,) = values(read_harmful, 1, str(tmp_path))
    assert "can't read checkpoint" in heard
    assert not (tmp_path / "harmed").exists()
