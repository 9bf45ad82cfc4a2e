"""Engine: levers that trade generality or memory for speed, and leave the numbers alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .. import train
from ..config import Config, OptimConfig
from ..engine import gradient
from ..engine.levers import place
from ..engine.loader import to_device
from ..engine.optim import build_optimizer
from .harness import outcomes, values
from .parts import joined
from .scenario import run_training, set_config
from .toy import NUM_TARGETS, Notes, Toy, ToyNet, put

CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=1,
    data__num_workers=0,
    global_batch_size=16,
)
TOY = Toy(num_samples=62, depth=2, has_plain_sgd=True)  # the last of four windows is short


# DDP's own.


def note_gradients() -> list[tuple[int, ...]]:
    """Prepare a training; in each step, the memory that the gradients lie in."""
    TOY.use()
    steps: list[tuple[int, ...]] = []
    to_mean = gradient.to_mean

    def noted(module: nn.Module, factor: Any) -> None:
        found = [parameter.grad for parameter in module.parameters()]
        steps.append(tuple(g.untyped_storage().data_ptr() for g in found if g is not None))
        to_mean(module, factor)

    put(gradient, to_mean=noted)
    return steps


@pytest.mark.parametrize("is_view", [True, False])
def test_gradients_lie_in_the_bucket(run_dir: str, is_view: bool) -> None:
    config = set_config(CONFIG, run_dir=run_dir, ddp__gradient_as_bucket_view=is_view)
    for rank in values(run_training, 2, config, note_gradients):
        assert [len(set(step)) for step in rank.notes] == [1 if is_view else 6] * 4


class Branching(ToyNet):
    """Adds a layer's answer in every second forward, and not in the same ones on all ranks."""

    def __init__(self) -> None:
        super().__init__(TOY)
        self.extra = nn.Linear(6, NUM_TARGETS)
        self.never = nn.Linear(6, NUM_TARGETS)
        self.num_forwards = int(torch.distributed.get_rank())

    def forward(self, inputs: Tensor) -> Tensor:
        """As without it, or with the layer's answer added."""
        self.num_forwards += self.training
        predictions = super().forward(inputs)
        return predictions + self.extra(inputs) if self.num_forwards % 2 else predictions


def use_branches() -> Notes:
    """Prepare a training of such a model."""
    notes = TOY.use()

    def build_model(_: Any) -> nn.Module:
        torch.manual_seed(0)
        return Branching()

    put(train, build_model=build_model)
    return notes


def test_branch_that_some_steps_leave_out(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, ddp__find_unused_parameters=True)
    one, other = values(run_training, 2, config, use_branches)
    assert one.progress["step"] + one.progress["skipped"] == 4
    before = one.notes.weights[0]
    for name, tensor in one.parameters.items():
        assert torch.equal(tensor, other.parameters[name]), name
        assert torch.equal(tensor, before[name]) == name.startswith("never"), name


# Layouts, and the optimizer's kernel.


class ImageNet(nn.Module):
    """Convolutions; notes how its input and its kernel lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3))
        self.head = nn.Linear(4, NUM_TARGETS)
        self.layouts: set[tuple[bool, bool]] = set()

    def forward(self, images: Tensor) -> Tensor:
        """Predictions (B, NUM_TARGETS) from images (B, 2, 4, 4)."""
        last = torch.channels_last
        kernel = self.features[0].weight
        assert isinstance(kernel, Tensor)
        self.layouts.add(
            (images.is_contiguous(memory_format=last), kernel.is_contiguous(memory_format=last))
        )
        predictions: Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return predictions


def use_images() -> list[set[tuple[bool, bool]]]:
    """Prepare a training on images; the layouts of the model and of its copies."""
    TOY.use()
    program: Any = train
    build_datasets = program.data.build_datasets
    layouts: list[set[tuple[bool, bool]]] = []

    def build_model(_: Any) -> nn.Module:
        torch.manual_seed(0)
        module = ImageNet()
        layouts.append(module.layouts)
        return module

    def build_images(config: Any) -> Any:
        datasets = build_datasets(config)
        for dataset in datasets:
            generator = torch.Generator().manual_seed(len(dataset))
            dataset.inputs = torch.randn(len(dataset), 2, 4, 4, generator=generator)
        return datasets

    put(train, build_model=build_model)
    put(program.data, build_datasets=build_images)
    return layouts


def test_channels_last_changes_the_layout_and_nothing_else(run_dir: str) -> None:
    usual = set_config(CONFIG, dtype="float64", eval_every=2)
    last = set_config(usual, channels_last=True)
    ranks = {}
    for name, parts in {
        "usual": (usual,),
        "last": (last,),
        "resumed": (last, last),
        "mixed": (last, usual),
    }.items():
        for number, part in enumerate(parts):
            stop = None if number == len(parts) - 1 else 2
            config = set_config(part, run_dir=f"{run_dir}-{name}", max_steps=stop)
            ended = outcomes(run_training, 2, config, use_images)
            assert not any("stride" in rank.output for rank in ended)  # DDP would warn
            ranks[name] = ended[0].value
    assert ranks["last"].notes == [{(True, True)}]
    assert ranks["usual"].notes == [{(False, False)}]
    assert ranks["resumed"].digest == ranks["last"].digest
    for name in ("last", "mixed"):
        for key, tensor in ranks["usual"].parameters.items():
            torch.testing.assert_close(ranks[name].parameters[key], tensor, rtol=0, atol=1e-12)


def test_only_tensors_with_four_dimensions_have_channels() -> None:
    batch = {"images": torch.zeros(2, 3, 4, 5), "volumes": [torch.zeros(2, 3, 4, 5, 6)]}
    moved = to_device(batch, torch.device("cpu"), torch.float32, torch.channels_last)
    assert moved["images"].is_contiguous(memory_format=torch.channels_last)
    assert moved["volumes"][0].is_contiguous()


def steps_after_a_resume(fused: bool) -> list[Tensor]:
    """Weights after two steps in channels_last; between them, a checkpoint of a usual run."""
    torch.manual_seed(0)
    config = set_config(CONFIG, dtype="float64", channels_last=True)
    module = place(nn.Conv2d(2, 4, 3), config, torch.device("cpu"))
    optimizer = build_optimizer(module, OptimConfig(fused=fused))
    images = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    module(images).square().sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    for moments in state["state"].values():
        moments.update({name: value.contiguous() for name, value in moments.items()})
    for group in state["param_groups"]:
        group["fused"] = not fused
    optimizer.load_state_dict(state)
    assert {group["fused"] for group in optimizer.param_groups} == {fused}
    module(images).square().sum().backward()
    optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def compare_fused(_: str) -> list[float]:
    """The largest differences between a fused step and one that is not."""
    pairs = zip(steps_after_a_resume(True), steps_after_a_resume(False), strict=True)
    return [float((one - other).abs().max()) for one, other in pairs]


def test_fused_step_is_the_same_step() -> None:
    [differences] = values(compare_fused, 1)
    assert max(differences) < 1e-12


def test_fused_step_resumes_exactly(run_dir: str) -> None:
    config = set_config(CONFIG, optim__fused=True)
    [straight] = values(run_training, 1, set_config(config, run_dir=f"{run_dir}-1"), Toy().use)
    for stop in (2, None):
        part = set_config(config, run_dir=run_dir, max_steps=stop)
        [resumed] = values(run_training, 1, part, Toy().use)
    assert resumed.digest == straight.digest


@pytest.mark.parametrize(
    ("fused", "device", "expected"),
    [
        (None, "cuda", True),
        (None, "cpu", False),
        (True, "cpu", True),
        (False, "cuda", False),
    ],
)
def test_fused_where_the_device_has_it(
    monkeypatch: pytest.MonkeyPatch, fused: bool | None, device: str, expected: bool
) -> None:
    parameter = SimpleNamespace(requires_grad=True, ndim=2, device=SimpleNamespace(type=device))
    module: Any = SimpleNamespace(parameters=lambda: [parameter])
    told: list[Any] = []

    class Noted(torch.optim.SGD):
        def __init__(self, _: Any, lr: float, fused: bool) -> None:
            told.append(fused)
            super().__init__([nn.Parameter(torch.zeros(1))], lr)

    monkeypatch.setattr(torch.optim, "AdamW", Noted)
    build_optimizer(module, OptimConfig(fused=fused))
    assert told == [expected]


def precision(init_method: str, tf32: bool) -> tuple[str, bool, bool]:
    """What torch is told about float32 in products and in convolutions."""
    with joined(init_method, tf32=tf32):
        return (
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
        )


def test_tensor_float_32_is_on_or_off_everywhere() -> None:
    assert values(precision, 1, True) == [("high", True, True)]
    assert values(precision, 1, False) == [("highest", False, False)]
