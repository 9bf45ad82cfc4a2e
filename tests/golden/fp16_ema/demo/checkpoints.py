"""Engine: look at the checkpoints of a run, check them, take the weights out of one.

python -m demo.checkpoints RUN_DIR [--verify | --export FILE …]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .engine.launch import Refused
from .engine.manifest import Checkpoint, best, list_checkpoints, read_checkpoint

PROGRAM = f"python -m {__package__}.checkpoints"


def main(argv: Sequence[str] | None = None) -> int:
    """List, verify or export; the exit code: 1 where one is damaged, 2 for a mistake."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="The checkpoints of a run.")
    parser.add_argument("run_dir", type=Path, help="the run directory")
    parser.add_argument("--verify", action="store_true", help="read every byte, not sizes alone")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write plain weights here")
    parser.add_argument("--step", type=int, help="export this step (else the newest complete one)")
    parser.add_argument("--best", action="store_true", help="export the one of least loss")
    parser.add_argument("--ema", action="store_true", help="export the averaged weights")
    options = parser.parse_args(argv)
    root = options.run_dir / "checkpoints"
    try:
        if not root.is_dir():
            raise Refused(f"expected a run directory with checkpoints, got {options.run_dir}")
        if options.export is None:
            return show(root, verify=options.verify)
        checkpoint = pick(root, options.step, is_best=options.best)
        export(checkpoint, "ema" if options.ema else "model", options.export)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def show(root: Path, *, verify: bool) -> int:
    """Print a line for each checkpoint, the newest first; 1 where one is not complete."""
    found: dict[Path, Checkpoint | str] = {}
    for path in list_checkpoints(root):
        try:
            found[path] = read_checkpoint(path, verify=verify)
        except ValueError as error:
            found[path] = str(error)
    complete = [one for one in found.values() if isinstance(one, Checkpoint)]
    top = best(complete)
    print(f"{'step':>10}  {'MiB':>10}  {'loss':>10}  state")
    for path, one in found.items():
        step = int(path.name.removeprefix("step_"))
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 2**20
        loss, state = "", f"not complete: {one}"
        if isinstance(one, Checkpoint):
            loss = "" if one.manifest.valid_loss is None else f"{one.manifest.valid_loss:.6g}"
            state = "complete, every byte checked" if verify else "complete"
            state += ", best" if one is top else ""
        print(f"{step:>10}  {size:>10.2f}  {loss:>10}  {state}")
    for path in sorted(root.glob("step_*.*")):
        print(f"{'':>34}  {path.name}: left over, no run reads it")
    return int(len(complete) < len(found))


def pick(root: Path, step: int | None, *, is_best: bool) -> Checkpoint:
    """The checkpoint that is asked for, every byte of it checked.

    Raises:
        Refused: there is none, or it is not complete.
    """
    reasons = []
    complete = []
    for path in list_checkpoints(root):
        if step in (None, int(path.name.removeprefix("step_"))):
            try:
                complete.append(read_checkpoint(path, verify=True))
            except ValueError as error:
                reasons.append(f" ({path.name}: {error})")
    chosen = best(complete) if is_best else next(iter(complete), None)
    if chosen is None:
        wanted = "with a validation loss" if is_best else f"of step {step}" if step else ""
        words = " ".join(filter(None, ("expected a complete checkpoint", wanted)))
        raise Refused(f"{words} in {root}, got none{''.join(reasons)}")
    return chosen


def export(checkpoint: Checkpoint, part: str, file: Path) -> None:
    """Write a part's tensors as one file, in safetensors' format where it is named so.

    Raises:
        Refused: the file is there already, its place is not, or safetensors is not installed.
    """
    if file.exists() or not file.parent.is_dir():
        raise Refused(f"--export: expected the name of a new file in a directory, got {file}")
    from .engine.reading import read_part  # torch takes seconds, which a mistake need not wait for

    tensors = {name: tensor.contiguous() for name, tensor in read_part(checkpoint, part).items()}
    temporary = file.with_name(f".{file.name}.tmp")
    if file.suffix == ".safetensors":
        try:
            from safetensors.torch import save_file
        except ImportError:
            raise Refused(
                f"--export: {file.name} needs the package safetensors: install it, or name another "
                "type of file, which torch.save writes"
            ) from None
        # Tied weights are one tensor under two names, which the format does not know.
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, temporary)
    else:
        import torch

        torch.save(tensors, temporary)
    temporary.replace(file)
    print(f"{file}: {len(tensors)} tensors of {part} from {checkpoint.path.name}")


if __name__ == "__main__":
    sys.exit(main())
