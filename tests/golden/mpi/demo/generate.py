"""Yours: let a trained model write.

    python -m demo.generate RUN_DIR [--prompt TEXT]

The sample goes to standard output, everything else to standard error.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from .config import Config
from .engine.cli import EXIT_REFUSED
from .engine.distributed import choose_device
from .engine.explain import one_line
from .engine.launch import Launch, Refused
from .engine.manifest import Checkpoint, best, list_checkpoints, read_checkpoint
from .engine.reading import read_part
from .engine.rundir import PACKAGE
from .model import build_model
from .settings import BLOCK_SIZE, ModelConfig

PART = "ema"
"""The weights that evaluation compares checkpoints by."""


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that a path is, or the best of a run directory; else its newest complete one.

    Raises:
        Refused: there is none.
    """
    is_one = (path / "manifest.json").exists()
    complete, reason = [], ""
    for one in [path] if is_one else list_checkpoints(path / "checkpoints"):
        try:
            complete.append(read_checkpoint(one, verify=True))
        except ValueError as error:
            reason = f": {one.name} can't be read, {error}"
    chosen = best(complete) or next(iter(complete), None)  # the newest comes first
    if chosen is None:
        raise Refused(f"expected a run directory or a checkpoint, got {path}{reason}")
    return chosen


def load_model(checkpoint: Checkpoint, device: torch.device) -> nn.Module:
    """The model of a checkpoint with its weights, as for evaluation.

    Raises:
        Refused: it is another project's, or another version's of this one.
    """
    weights = read_part(checkpoint, PART)
    try:
        model = build_model(ModelConfig(**checkpoint.manifest.config["model"]))
        model.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Refused(f"{checkpoint.path} does not fit this model: {error}") from None
    return model.to(device).eval()


@torch.inference_mode()
def generate(model: nn.Module, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
    """The prompt and `length` bytes more, each drawn after at most BLOCK_SIZE before it.

    Temperature 0 takes the likeliest byte each time. Drawn on the CPU, from `seed` alone.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    text = list(prompt)
    for _ in range(length):
        context = torch.tensor([text[-BLOCK_SIZE:]], device=device)  # (1, T)
        scores = model(context)[0, -1].double().cpu()
        if temperature == 0:
            text.append(int(scores.argmax()))
        else:
            chances = (scores / temperature).softmax(dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text)


class Parser(argparse.ArgumentParser):
    """Says a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise Refused(message)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what the command line asks for.

    Raises:
        Refused: it makes no sense.
    """
    parser = Parser(prog=f"python -m {PACKAGE}.generate", description="Write from a checkpoint.")
    parser.add_argument("path", type=Path, help="run directory, or one of its checkpoints")
    parser.add_argument("--prompt", default="def ", help="what the text begins with")
    parser.add_argument("--length", type=int, default=400, help="bytes to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--device", default=Config.device, help="as in a training")
    words = parser.parse_args(argv)
    if not words.prompt:
        parser.error("prompt: expected at least one byte, got none")
    if words.length < 0 or not 0 <= words.temperature < float("inf"):
        parser.error(
            "length and temperature: expected 0 or more, "
            f"got {words.length} and {words.temperature}"
        )
    return words


def main(argv: Sequence[str]) -> None:
    """Write one sample."""
    words = parse(argv)
    device = choose_device(words.device, Launch())
    checkpoint = find_checkpoint(words.path)
    model = load_model(checkpoint, device)
    print(f"{PART} of {checkpoint.path}", file=sys.stderr)
    prompt = words.prompt.encode(errors="surrogateescape")
    text = generate(model, prompt, words.length, words.temperature, words.seed)
    print(text.decode(errors="replace"))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as error:
        print(f"{PACKAGE}: {one_line(str(error))}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
