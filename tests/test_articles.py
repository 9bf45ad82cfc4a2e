"""What two popular articles say about DDP, tried on torch itself: docs/articles.md names the tests.

Nothing of a rendered project is used here, so that what is shown is torch's doing.
"""

# mypy: untyped-calls-exclude=torch

import functools
import gc
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import constants, distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

# What a rank sends when it ends: its result, or how it failed.
Report = tuple[Any, str | None]


def on_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """Call `function(rank, *args)` on gloo ranks and give their results; None of one that died.

    The ranks are forked from a server that has imported torch and never computes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.run", "pytest"])
    with tempfile.TemporaryDirectory() as directory:
        ranks, readers = [], []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            arguments = (writer, directory, rank, world_size, function, args)
            process = context.Process(target=_rank, args=arguments)
            process.start()
            writer.close()
            ranks.append(process)
            readers.append(reader)
        reports = [_receive(reader) for reader in readers]
        for process in ranks:  # they sleep: nobody leaves while another still talks to it
            process.kill()
            process.join()
    problems = [problem for _, problem in reports if problem]
    assert not problems, "\n".join(problems)
    return [value for value, _ in reports]


def _receive(reader: Connection) -> Report:
    try:
        report: Report = reader.recv() if reader.poll(60) else (None, "no answer in 60 s")
    except EOFError:
        return None, None
    return report


def _rank(
    writer: Connection,
    directory: str,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    problem, value = None, None
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        value = function(rank, *args)
    except BaseException:
        problem = traceback.format_exc()
    gc.collect()
    writer.send((value, problem))
    time.sleep(60)


def small_model() -> nn.Module:
    """The same weights wherever it is built."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def deep_model() -> nn.Module:
    """Four layers of 1 MiB each."""
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Some scalar."""
    loss: Tensor = model(inputs).square().mean()
    return loss


def numbers(*tensors: Tensor) -> list[float]:
    """All elements of the tensors, to be sent and compared bit for bit."""
    return [number for tensor in tensors for number in tensor.detach().flatten().tolist()]


def weights(model: nn.Module) -> list[float]:
    """All parameters of a model."""
    return numbers(*model.parameters())


def observed(model: nn.Module, events: list[str], **options: Any) -> DistributedDataParallel:
    """The model in DDP; each gradient that is ready and each all-reduce is noted in `events`."""
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    wrapped = DistributedDataParallel(model, **options)

    def reduce(_state: object, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        held = sorted(names[parameter.data_ptr()] for parameter in bucket.parameters())
        events.append(f"all-reduce {' '.join(held)}")
        return allreduce_hook(distributed_c10d._get_default_group(), bucket)

    def note(parameter: Tensor) -> None:
        events.append(f"gradient {names[parameter.data_ptr()]}")

    wrapped.register_comm_hook(None, reduce)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    return wrapped


def reductions(events: list[str]) -> list[str]:
    """The all-reduces among the events: which parameters each of them carried."""
    return [event.removeprefix("all-reduce ") for event in events if event.startswith("all-")]


# Accumulation


def _accumulate(rank: int, *, is_right: bool) -> tuple[int, list[float], bool]:
    events: list[str] = []
    model = observed(nn.Linear(6, 3), events)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    batches = torch.randn(7, 4, 6)  # two windows of three, and a short one
    for idx, inputs in enumerate(batches):
        is_last = (idx + 1) % 3 == 0 or (is_right and idx + 1 == len(batches))
        with nullcontext() if is_right and is_last else model.no_sync():
            loss_of(model, inputs).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    is_left = any(parameter.grad is not None for parameter in model.parameters())
    return len(reductions(events)), weights(model), is_left


def test_no_sync_around_every_micro_batch_never_reduces_and_ranks_part() -> None:
    (count, first, is_left), (_, second, _) = on_ranks(_snippet)
    assert count == 0
    assert first != second
    assert is_left, "the last, short window is never stepped on"


def _snippet(rank: int) -> tuple[int, list[float], bool]:
    return _accumulate(rank, is_right=False)


def test_no_sync_around_all_but_the_last_micro_batch_reduces_once_a_window() -> None:
    (count, first, is_left), (_, second, _) = on_ranks(_right_form)
    assert count == 3
    assert first == second
    assert not is_left


def _right_form(rank: int) -> tuple[int, list[float], bool]:
    return _accumulate(rank, is_right=True)


def _no_sync_around_a_part(rank: int) -> tuple[int, int]:
    events: list[str] = []
    model = observed(nn.Linear(6, 3), events)
    inputs = torch.full((4, 6), float(rank))
    loss = loss_of(model, inputs)
    with model.no_sync():
        loss.backward()
    around_backward = len(reductions(events))
    with model.no_sync():
        loss = loss_of(model, inputs)
    loss.backward()
    return around_backward, len(reductions(events)) - around_backward


def test_no_sync_works_on_the_forward() -> None:
    assert on_ranks(_no_sync_around_a_part) == [(1, 0)] * 2


def _static_graph(_: int, *, is_synchronised_first: bool) -> str:
    model = DistributedDataParallel(nn.Linear(6, 3), static_graph=True)
    inputs = torch.ones(4, 6)
    try:
        if is_synchronised_first:
            loss_of(model, inputs).backward()
        for _ in range(2):
            with model.no_sync():
                loss_of(model, inputs).backward()
            loss_of(model, inputs).backward()
    except RuntimeError as error:
        return str(error)
    return "fine"


def _static_graph_first(rank: int) -> tuple[str, str]:
    return (
        _static_graph(rank, is_synchronised_first=True),
        _static_graph(rank, is_synchronised_first=False),
    )


def test_static_graph_breaks_where_the_first_backward_is_not_synchronised() -> None:
    for right, wrong in on_ranks(_static_graph_first):
        assert right == "fine"
        assert "INTERNAL ASSERT FAILED" in wrong


# Buckets, and what DDP sends


@functools.cache
def two_iterations(**options: Any) -> list[list[str]]:
    """What happens in a first and a second iteration under these options of DDP, on rank 0."""
    iterations: list[list[str]] = on_ranks(_two_iterations, options)[0]
    return iterations


def _two_iterations(_: int, options: dict[str, Any]) -> list[list[str]]:
    events: list[str] = []
    model = observed(deep_model(), events, **options)
    iterations = []
    for _ in range(2):
        events.clear()
        loss_of(model, torch.ones(1, 512)).backward()
        events.append("backward returned")
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        loss_of(model, torch.ones(1, 512))
        iterations.append(events[:])
    return iterations


ALL = "0.weight 1.weight 2.weight 3.weight"


def test_first_iteration_has_one_bucket_then_buckets_follow_the_ready_order() -> None:
    first, second = two_iterations()
    assert reductions(first) == [ALL]
    assert reductions(second) == ["3.weight", "0.weight 1.weight 2.weight"]


def test_all_reduce_overlaps_the_backward_it_belongs_to() -> None:
    first, second = two_iterations()
    assert first[-2:] == [f"all-reduce {ALL}", "backward returned"], "nothing to overlap with"
    assert second == [
        "gradient 3.weight",
        "all-reduce 3.weight",
        "gradient 2.weight",
        "gradient 1.weight",
        "gradient 0.weight",
        "all-reduce 0.weight 1.weight 2.weight",
        "backward returned",  # neither step() nor the next forward sends a gradient
    ]


@pytest.mark.parametrize("size", [25, 50])
def test_bucket_size_given_by_hand_takes_the_small_first_bucket_away(size: int) -> None:
    first, second = two_iterations(bucket_cap_mb=size)
    assert reductions(first) == reductions(second) == [ALL]


def test_find_unused_parameters_keeps_the_first_layout() -> None:
    first, second = two_iterations(find_unused_parameters=True)
    assert reductions(first) == reductions(second)


def _wrap_differing(rank: int) -> tuple[list[float], list[float], list[float]]:
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    before = weights(module)
    model = DistributedDataParallel(module)
    module[1].get_buffer("running_mean").fill_(rank)
    loss_of(model, torch.randn(4, 6)).backward()
    return (
        before,
        weights(module),
        numbers(*(p.grad for p in module.parameters() if p.grad is not None)),
    )


def test_wrapping_sends_rank_0s_weights_to_all() -> None:
    first, second = on_ranks(_wrap_differing)
    assert first[0] != second[0]
    assert first[1:] == second[1:]
    assert first[0] == first[1]


def _all_reduce(rank: int) -> float:
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return value.item()


def test_all_reduce_adds_and_does_not_average() -> None:
    assert on_ranks(_all_reduce) == [3.0, 3.0]


# What is equal on the ranks, and what is not

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@functools.cache
def trained(name: str) -> list[dict[str, list[float]]]:
    """What each of two ranks holds after twenty steps."""
    return on_ranks(_train, name)


def _train(rank: int, name: str) -> dict[str, list[float]]:
    module = small_model()
    model = DistributedDataParallel(module)
    optimizer = OPTIMIZERS[name](model.parameters())
    torch.manual_seed(rank + 1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, torch.randn(8, 6))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "parameters": weights(module),
        "optimizer": numbers(*(t for entry in state.values() for t in entry.values())),
        "buffers": numbers(*module.buffers()),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_equal_on_all_ranks(name: str) -> None:
    first, second = trained(name)
    assert first["losses"] != second["losses"], "each rank has a batch, and a loss, of its own"
    assert first["parameters"] == second["parameters"]
    assert len(first["optimizer"]) >= len(first["parameters"])
    assert first["optimizer"] == second["optimizer"]


def test_buffers_are_not_equal_on_all_ranks() -> None:
    first, second = trained("Adam")
    assert first["parameters"] == second["parameters"]
    assert first["buffers"] != second["buffers"]


def test_unseeded_processes_make_different_data() -> None:
    command = [sys.executable, "-c", "import torch; print(torch.randn(2).tolist())"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate()[0] for process in both)
    assert first != second


# Samplers and loaders


def sampler_of(num_samples: int, world_size: int, rank: int, **options: Any) -> Any:
    """What both articles share the samples out with."""
    samples = TensorDataset(torch.zeros(num_samples))
    return DistributedSampler(samples, num_replicas=world_size, rank=rank, **options)


def shares(num_samples: int, world_size: int, **options: Any) -> list[list[int]]:
    """What DistributedSampler gives to each rank."""
    return [
        list(sampler_of(num_samples, world_size, rank, **options)) for rank in range(world_size)
    ]


@pytest.mark.parametrize(("num_samples", "world_size"), [(1001, 8), (1000, 8), (10, 4), (2, 8)])
def test_distributed_sampler_gives_equal_lengths_without_drop_last(
    num_samples: int, world_size: int
) -> None:
    assert len({len(share) for share in shares(num_samples, world_size)}) == 1


@pytest.mark.parametrize(
    ("num_samples", "world_size", "twice"), [(1000, 8, 0), (1001, 8, 7), (10, 4, 2), (2, 8, 6)]
)
def test_distributed_sampler_gives_some_samples_twice(
    num_samples: int, world_size: int, twice: int
) -> None:
    given = [index for share in shares(num_samples, world_size) for index in share]
    assert set(given) == set(range(num_samples))
    assert len(given) - num_samples == twice


@pytest.mark.parametrize(("batch_size", "lost"), [(32, 232), (128, 1000)])
def test_drop_last_of_the_loader_loses_samples_of_every_epoch(batch_size: int, lost: int) -> None:
    samples = TensorDataset(torch.zeros(1000))
    used = 0
    for rank in range(8):
        sampler = sampler_of(1000, 8, rank)
        loader = DataLoader(samples, batch_size=batch_size, sampler=sampler, drop_last=True)
        used += len(loader) * batch_size
    assert 1000 - used == lost


def test_drop_last_of_the_sampler_can_leave_nothing() -> None:
    assert shares(3, 4, drop_last=True) == [[], [], [], []]
    assert sum(len(share) for share in shares(10, 4, drop_last=True)) == 8


def test_shuffle_beside_a_sampler_is_an_error() -> None:
    samples = TensorDataset(torch.zeros(8))
    sampler = sampler_of(8, 2, 0)
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(samples, sampler=sampler, shuffle=True)


def test_set_epoch_adds_the_epoch_to_the_seed() -> None:
    orders = []
    for seed, epoch in ((0, 5), (5, 0)):
        sampler = sampler_of(100, 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[1]


def test_without_set_epoch_the_order_repeats_and_every_sample_is_still_seen() -> None:
    sampler = sampler_of(100, 1, 0)
    first, second = list(sampler), list(sampler)
    assert first == second
    assert sorted(first) == list(range(100))


def test_padded_evaluation_is_wrong() -> None:
    is_right = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    counted = [is_right[index] for share in shares(10, 4, shuffle=False) for index in share]
    assert sum(is_right) / len(is_right) == 0.2
    assert sum(counted) / len(counted) == pytest.approx(1 / 3)


def test_loader_settings_that_need_workers_are_errors_without_them() -> None:
    samples = TensorDataset(torch.zeros(8))
    with pytest.raises(ValueError, match="persistent_workers option needs num_workers > 0"):
        DataLoader(samples, persistent_workers=True)
    with pytest.raises(ValueError, match="prefetch_factor option could only be specified in"):
        DataLoader(samples, prefetch_factor=4)


class _TellsItsEpoch(Dataset[int]):
    epoch = 0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return self.epoch


def _epochs_seen(_: int) -> list[int]:
    seen = []
    samples = _TellsItsEpoch()
    loader = DataLoader(samples, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        samples.epoch = epoch
        seen += [int(value) for value in loader]
    return seen


def test_persistent_workers_do_not_see_the_data_set_change() -> None:
    assert on_ranks(_epochs_seen, world_size=1) == [[0, 0, 0]]


# Mixed precision, averaged weights, checkpoints


def _gradient_norms() -> tuple[float, float]:
    """The norm that clipping sees, without and with unscale_ before it."""
    norms = []
    for is_unscaled in (False, True):
        model = small_model()
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(loss_of(model, torch.ones(4, 6) + torch.eye(4, 6))).backward()
        if is_unscaled:
            scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
    return norms[0], norms[1]


def test_clipping_without_unscale_clips_the_scaled_gradient() -> None:
    wrong, right = _gradient_norms()
    assert wrong == pytest.approx(65536 * right)


def test_scaled_backward_needs_the_scalers_step() -> None:
    moved = {}
    for who in ("optimizer", "scaler"):
        model = small_model()
        start = weights(model)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        scaler.scale(loss_of(model, torch.ones(4, 6) + torch.eye(4, 6))).backward()
        if who == "scaler":
            scaler.step(optimizer)
        else:
            optimizer.step()
        moved[who] = max(abs(a - b) for a, b in zip(weights(model), start, strict=True))
    assert moved["optimizer"] > 1000 * moved["scaler"] > 0


@pytest.mark.parametrize("name", ["GradScaler", "autocast"])
def test_torch_cuda_amp_is_deprecated(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(torch.cuda.amp, name)()
    assert any(f"`torch.cuda.amp.{name}(args...)` is deprecated" in str(w.message) for w in caught)


def test_ema_as_a_dict_of_parameters_does_not_load() -> None:
    model = small_model()
    averaged = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"Missing key.*running_mean"):
        model.load_state_dict(averaged)


def test_averaged_model_without_its_counter_starts_again() -> None:
    model = nn.Linear(1, 1, bias=False)
    average, resumed = (
        AveragedModel(model, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new) for _ in range(2)
    )
    average.update_parameters(model)
    resumed.module.load_state_dict(average.module.state_dict())
    nn.init.constant_(model.weight, 5.0)
    for each in (average, resumed):
        each.update_parameters(model)
    assert weights(average.module) < [5.0]
    assert weights(resumed.module) == [5.0], "the average is gone"


def _load(rank: int, is_before: bool, ranks: list[int]) -> tuple[list[float], list[str]]:
    torch.manual_seed(7)
    saved = nn.Linear(6, 3).state_dict()
    torch.manual_seed(rank)
    module = nn.Linear(6, 3)
    if is_before and rank in ranks:
        module.load_state_dict(saved)
    model = DistributedDataParallel(module)
    if not is_before and rank in ranks:
        module.load_state_dict(saved)
    return weights(module), list(model.state_dict())


def test_loading_before_wrapping_is_fine_even_on_rank_0_alone() -> None:
    (expected, names), _ = on_ranks(_load, True, [0, 1])
    assert [loaded for loaded, _ in on_ranks(_load, False, [0, 1])] == [expected] * 2
    assert [loaded for loaded, _ in on_ranks(_load, True, [0])] == [expected] * 2
    assert names == ["module.weight", "module.bias"], "what saving the wrapper would write"


def test_loading_after_wrapping_on_rank_0_alone_leaves_ranks_different() -> None:
    (first, _), (second, _) = on_ranks(_load, False, [0])
    assert first != second


def test_map_location_of_cuda_0_leaves_other_tensors_where_they_are(tmp_path: Any) -> None:
    path = tmp_path / "model.pt"
    torch.save(torch.ones(2), path)
    assert torch.load(path, map_location={"cuda:0": "cuda:1"}).device.type == "cpu"


# Starting, waiting, failing


def test_redis_is_no_rendezvous() -> None:
    parameters = RendezvousParameters("redis", "localhost:29500", "run", 1, 1)
    with pytest.raises(ValueError, match="rendezvous backend 'redis' is not registered"):
        get_rendezvous_handler(parameters)


def test_torchrun_restarts_nothing_by_default() -> None:
    assert get_args_parser().parse_args(["train.py"]).max_restarts == 0


def test_an_endpoint_alone_is_the_static_rendezvous() -> None:
    arguments = get_args_parser().parse_args(["--rdzv-endpoint=localhost:29500", "train.py"])
    assert arguments.rdzv_backend == "static"
    assert not arguments.standalone


def test_default_time_out_is_not_one_number() -> None:
    assert constants.default_pg_timeout == timedelta(minutes=30)
    assert "10 minutes for NCCL and 30 minutes for other" in str(dist.init_process_group.__doc__)
    # None in a torch without NCCL.
    assert constants.default_pg_nccl_timeout in {None, timedelta(minutes=10)}


def test_device_ids_on_a_cpu_are_an_error() -> None:
    assert all("device_ids" in message for message in on_ranks(_wrap_with_device_ids))


def _wrap_with_device_ids(_: int) -> str:
    try:
        DistributedDataParallel(nn.Linear(6, 3), device_ids=[0])
    except ValueError as error:
        return str(error)
    return "fine"


def _wait_alone() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limit = timedelta(seconds=1)
    try:
        dist.TCPStore("127.0.0.1", port, 2, True, limit)  # type: ignore[attr-defined]
    except dist.DistStoreError as error:
        return str(error)
    return "fine"


def test_a_missing_process_is_named_after_the_time_out() -> None:
    assert "1/2 clients joined" in _wait_alone()


def _outlive_the_other(rank: int) -> float:
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return time.monotonic() - start
    return -1.0


def test_a_dead_rank_is_an_error_of_the_others_at_once_on_gloo() -> None:
    waited_s, dead = on_ranks(_outlive_the_other)
    assert dead is None
    assert 0 <= waited_s < 10, "far less than the time-out of 30 s"


def test_ddp_of_one_process_works() -> None:
    (losses,) = [rank["losses"] for rank in on_ranks(_train, "Adam", world_size=1)]
    assert losses[-1] < losses[0]


def test_numpy_numbers_do_not_load_with_weights_only(tmp_path: Any) -> None:
    import numpy as np

    path = tmp_path / "checkpoint.pt"
    torch.save({"best": np.float64(0.5)}, path)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path)
