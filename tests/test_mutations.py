"""Faults that people really build in, each put into a rendered project: its own tests go red.

A row fails when its old text is no longer in the project, so that the table can't rot.
"""

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.conftest import Count
from tests.own_tests import run_own_tests
from tests.rendering import SLUG, Answers, render, silent
from tests.serving import Server

# All that can go wrong is in there: loss scale, averaged weights, micro-batches, machines, tasks.
ANSWERS: Answers = {
    "backend": "gloo",
    "nodes": "multi",
    "cluster": "slurm",
    "amp": "fp16",
    "ema": True,
    "tracker": "none",
}

EXACTNESS = "test_exactness.py::test_epochs_equal_a_single_process"
RESUME = "test_resume.py::test_stopped_and_resumed_is_bit_exact"


@dataclass(frozen=True)
class Mutation:
    """A fault, where it goes in, and the test that must see it."""

    name: str
    caught_by: str
    """Node id below the rendered tests/."""
    edits: tuple[tuple[str, str, str], ...]
    """File in the package, its text, and what comes in its place."""
    checkpoint: str
    """The strategy of the project that it goes into."""


def mutation(name: str, caught_by: str, *edits: str, checkpoint: str = "rank0") -> Mutation:
    """One row; the edits come as file, old, new, and again file, old, new."""
    triples = tuple(zip(edits[::3], edits[1::3], edits[2::3], strict=True))
    return Mutation(name, caught_by, triples, checkpoint)


# In the project with the fewest rows: those of one project are tried together without a fault.
launching = functools.partial(mutation, checkpoint="per_rank")

SYNCED = (
    "        with ddp.sync_only_if(job.model, is_last):\n            wait = forward_backward(\n"
)
BACKWARD = "    job.state.scaler.scale(loss).backward()\n"
NOMINAL = """    loss = loss / gradient.nominal_count(
        job.config.global_batch_size, job.world.world_size, task.TARGETS_PER_SAMPLE
    )
"""
COUNT = "    count = len(window) if task.TARGETS_PER_SAMPLE else sums[1]\n"
TO_MEAN = "    gradient.to_mean(state.module, config.global_batch_size / count)\n"
LEAVE_OUT = "        report.leave_out(job, None if is_empty else norm)\n"
UNSCALE = (
    "    state.scaler.unscale_(state.optimizer)  # once, before anything looks at the gradient\n"
)
CLIP = "    grad_norm = gradient.clip(state.module, config.optim.grad_clip)\n"
UPDATE_EMA = "        state.ema.update_parameters(state.module)\n"
RANK0_BUFFERS = "        if world.world_size > 1:\n            for buffer in module.buffers():\n"
SHARE = "split_evenly(range(num_samples), launch.world_size)[launch.rank]"

MUTATIONS = [
    # The gradient of a window.
    mutation(
        "no_sync around every micro-batch",
        "test_ranks.py::test_weights_are_equal_bit_for_bit",
        *("train.py", SYNCED, SYNCED.replace("is_last", "False")),
    ),
    mutation(
        "no_sync around the backward only",
        "test_collectives.py::test_a_step_reduces_each_bucket_once[2]",
        *("train.py", SYNCED),
        "        job.state.is_last = is_last\n"
        "        if True:\n"
        "            wait = forward_backward(\n",
        *("train.py", BACKWARD),
        f"    with ddp.sync_only_if(job.model, job.state.is_last):\n    {BACKWARD}",
    ),
    mutation(
        "the first micro-batch is synchronised, not the last",
        "test_ranks.py::test_weights_are_equal_bit_for_bit",
        *("train.py", SYNCED, SYNCED.replace("is_last", "micro == 0")),
    ),
    mutation(
        "a short window is divided by the configured number of samples",
        f"{EXACTNESS}[3 ranks]",
        *("train.py", COUNT),
        "    count = config.global_batch_size if task.TARGETS_PER_SAMPLE else sums[1]\n",
    ),
    mutation(
        "a short window is neither stepped nor cleared",
        "test_exactness.py::test_steps_and_learning_rates_do_not_depend_on_ranks[97]",
        *("train.py", "    wait()\n"),
        "    wait()\n"
        "    if len(window) < config.global_batch_size:\n"
        "        progress.consume(len(window), job.plan.num_samples)\n"
        "        return None\n",
    ),
    mutation(
        "mean of the micro-batches' means",
        "test_exactness.py::test_one_step_does_not_depend_on_how_its_samples_are_split",
        *("train.py", NOMINAL),
        "    window = job.plan.window(job.state.progress.position)\n"
        "    shares = job.plan.micro_batches(window, job.world.rank)\n"
        "    loss = loss / max(1, task.num_targets(batch)) / len(shares)\n",
        *("train.py", TO_MEAN, ""),
    ),
    mutation(
        "a rank without samples counts the one that it forwards",
        f"{EXACTNESS}[idle rank]",
        *("train.py", "    if not share:\n", "    if False:\n"),
    ),
    mutation(
        "gradients are clipped before they are unscaled",
        "test_fp16.py::test_scale_is_gone_before_the_gradient_is_clipped",
        *("train.py", UNSCALE, ""),
        *("train.py", CLIP, CLIP + UNSCALE),
    ),
    mutation(
        "the loss of each micro-batch is read",
        "test_collectives.py::test_a_step_waits_for_the_device_once[1]",
        *("train.py", "    sums[0] += loss.detach()\n", "    sums[0] += loss.item()\n"),
    ),
    # What goes on with a step, and only with a step.
    mutation(
        "the schedule goes on at a skipped step",
        "test_fp16.py::test_overflow_costs_one_step_and_half_the_scale",
        *("train.py", LEAVE_OUT, LEAVE_OUT + "        progress.step += 1\n"),
    ),
    mutation(
        "the schedule is a step behind",
        "test_exactness.py::test_steps_and_learning_rates_do_not_depend_on_ranks[96]",
        *("train.py", "optim.lr_at(progress.step + 1, ", "optim.lr_at(progress.step, "),
    ),
    mutation(
        "EMA is updated at a skipped step",
        "test_ema.py::test_no_update_for_a_step_that_was_not_taken",
        *("train.py", LEAVE_OUT, LEAVE_OUT + UPDATE_EMA),
    ),
    mutation(
        "EMA is updated in every micro-batch",
        "test_ema.py::test_one_update_a_step_also_after_a_resume",
        *("train.py", "            )\n    wait()\n", f"            )\n{UPDATE_EMA}    wait()\n"),
    ),
    # Randomness and order.
    mutation(
        "the rank is missing from the key of a forward",
        "test_ranks.py::test_no_two_forwards_draw_the_same",
        *("engine/keyed.py", '"forward", step, micro, rank)', '"forward", step, micro)'),
    ),
    mutation(
        "the step is missing from the key of a forward",
        "test_ranks.py::test_no_two_forwards_draw_the_same",
        *("engine/keyed.py", '"forward", step, micro, rank)', '"forward", micro, rank)'),
    ),
    mutation(
        "the micro-batch is missing from the key of a forward",
        "test_ranks.py::test_no_two_forwards_draw_the_same",
        *("engine/keyed.py", '"forward", step, micro, rank)', '"forward", step, rank)'),
    ),
    mutation(
        "the epoch is missing from the key of a sample",
        "test_ranks.py::test_no_two_samples_are_augmented_alike",
        *("engine/keyed.py", '"sample-{split}", epoch, index)', '"sample-{split}", index)'),
    ),
    mutation(
        "augmentation is not keyed",
        f"{RESUME}[1 rank, in an epoch]",
        *("engine/loader.py", "        seed_sample(self.seed, self.split, epoch, index)\n", ""),
    ),
    mutation(
        "set_epoch is forgotten",
        f"{EXACTNESS}[2 ranks]",
        *(
            "engine/sampler.py",
            "order = epoch_order(self.seed, epoch, ",
            "order = epoch_order(self.seed, 0, ",
        ),
    ),
    mutation(
        "each rank has an order of its own",
        f"{EXACTNESS}[2 ranks]",
        *(
            "engine/sampler.py",
            "epoch_order(self.seed, epoch, ",
            "epoch_order(self.seed + self.rank, epoch, ",
        ),
    ),
    mutation(
        "the epoch is missing from the key of the order",
        "test_sampler.py::test_epochs_differ_and_the_sampler_can_be_used_again",
        *("engine/sampler.py", 'key(seed, "order", epoch, num_samples)'),
        'key(seed, "order", num_samples)',
    ),
    # Resume.
    mutation(
        "the position is taken for a number of batches",
        f"{RESUME}[1 rank, in an epoch]",
        *("train.py", "progress.position, job.pulse)"),
        "progress.position // config.global_batch_size, job.pulse)",
    ),
    mutation(
        "EMA comes back without its counter",
        "test_ema.py::test_one_update_a_step_also_after_a_resume",
        *(
            "engine/state.py",
            '            self.ema.n_averaged.fill_(numbers["ema_updates"])\n',
            "",
        ),
    ),
    mutation(
        "the loss scale starts afresh",
        "test_fp16.py::test_scale_goes_on_after_a_resume",
        *("engine/state.py", 'self.scaler.load_state_dict(numbers["scaler"])', "pass"),
    ),
    mutation(
        "the optimizer starts afresh",
        f"{RESUME}[2 ranks, between epochs]",
        *(
            "engine/state.py",
            "            self._load_optimizer(parts",
            "            _ = (parts",
        ),
    ),
    mutation(
        "no throwaway pass, on three ranks",
        f"{RESUME}[3 ranks]",
        *("engine/ddp.py", "    _settle_buckets(model, loss_of)\n", ""),
    ),
    mutation(
        "one throwaway pass with a static graph, on three ranks",
        "test_resume.py::test_static_graph_on_three_ranks_is_bit_exact",
        *("engine/ddp.py", "range(2 if model.static_graph else 1)", "range(1)"),
    ),
    mutation(
        "the throwaway pass leaves its traces in the buffers",
        f"{RESUME}[2 ranks, between epochs]",
        *("engine/ddp.py", "    with unchanged_buffers(model.module):\n", "    if True:\n"),
    ),
    mutation(
        "names in the checkpoint begin with module.",
        "test_weights.py::test_weights_load_without_this_project",
        *("engine/state.py", '"model": dict(self.module.state_dict())'),
        '"model": {f"module.{k}": v for k, v in self.module.state_dict().items()}',
    ),
    mutation(
        "the metrics of steps that are taken again stay",
        "test_resume.py::test_crashed_run_goes_on_from_its_last_checkpoint",
        *("engine/metrics.py", "        cut_back(path, progress)\n", ""),
    ),
    # Evaluation.
    mutation(
        "evaluation is padded to equal shares",
        "test_evaluation.py::test_result_is_that_of_one_process[1003-2-7]",
        *("engine/sampler.py", f"        self.share = {SHARE}\n"),
        "        most = -(-num_samples // launch.world_size)\n"
        "        start = min(launch.rank * most, num_samples - most)\n"
        "        self.share = range(start, start + most)\n",
    ),
    mutation(
        "evaluation goes through the wrapper",
        "test_evaluation.py::test_buffers_are_those_of_rank_0[1]",
        *("train.py", "evaluate(job, state.module, loader)", "evaluate(job, job.model, loader)"),
    ),
    mutation(
        "each rank evaluates with its own buffers",
        "test_evaluation.py::test_buffers_are_those_of_rank_0[9]",
        *("engine/ddp.py", RANK0_BUFFERS, RANK0_BUFFERS.replace("world.world_size > 1", "False")),
    ),
    mutation(
        "training goes on in evaluation mode",
        "test_evaluation.py::test_training_does_not_see_evaluations",
        *("engine/ddp.py", "    module.train(was_training)\n", ""),
    ),
    mutation(
        "averaged weights stay in the model after their evaluation",
        "test_evaluation.py::test_training_does_not_see_evaluations",
        *("train.py", '    results["ema"] = evaluate(job, state.ema.module, loader)\n'),
        "    state.module.load_state_dict(state.ema.module.state_dict())\n"
        '    results["ema"] = evaluate(job, state.module, loader)\n',
    ),
    # Checkpoints.
    mutation(
        "the manifest comes before the files",
        "test_checkpoint.py::test_manifest_lists_the_files_and_reads_back",
        *(
            "engine/checkpoint.py",
            "        write_files(temporary)\n        seal(temporary, manifest)\n",
        ),
        "        seal(temporary, manifest)\n        write_files(temporary)\n",
    ),
    mutation(
        "the name is given before the manifest is on the disk",
        "test_checkpoint.py::test_all_is_on_the_disk_before_the_name_is_given",
        *("engine/checkpoint.py", "        file.flush()\n        os.fsync(file.fileno())\n"),
        "        file.flush()\n",
    ),
    mutation(
        "the manifest comes before the shards",
        "test_strategy.py::test_manifest_lists_every_file",
        *("engine/strategy.py", "        try:\n            # Its files are flushed when"),
        "        try:\n"
        "            if self.world.is_main:\n"
        "                seal(temporary, manifest)\n"
        "            # Its files are flushed when",
        *(
            "engine/strategy.py",
            "                seal(temporary, manifest)\n                publish(",
        ),
        "                publish(",
        checkpoint="sharded",
    ),
    mutation(
        "buffers of another rank are saved",
        "test_saving.py::test_buffers_are_those_of_rank_0",
        *("engine/strategy.py", "if owners.get((part, n), 0) == world.rank"),
        "if owners.get((part, n), world.world_size - 1) == world.rank",
        checkpoint="sharded",
    ),
    mutation(
        "all ranks' shards hold buffers",
        "test_saving.py::test_each_tensor_is_written_once_and_rank_0_writes_its_buffers",
        *("engine/strategy.py", "if owners.get((part, n), 0) == world.rank"),
        "if owners.get((part, n), world.rank) == world.rank",
        checkpoint="sharded",
    ),
    mutation(
        "the save beside the training uses the training's group",
        "test_saving.py::test_training_goes_on_and_nothing_is_seen_before_it_is_whole",
        *("engine/strategy.py", "process_group=self._group,", "process_group=None,"),
        checkpoint="sharded",
    ),
    mutation(
        "what is saved beside the training is not a copy",
        "test_saving.py::test_what_is_saved_is_what_was_there_at_the_call",
        *("engine/strategy.py", "copies = self._copy(own_share(job.state, self.world))"),
        "copies = own_share(job.state, self.world)",
        checkpoint="sharded",
    ),
    mutation(
        "nobody asks how the save in flight ended",
        "test_saving.py::test_failure_comes_up_at_the_next_save_and_leaves_nothing",
        *("engine/strategy.py", "            self._in_flight.result()\n"),
        "            self._in_flight.exception()\n",
        checkpoint="sharded",
    ),
    mutation(
        "metadata of a checkpoint may run code",
        "test_saving.py::test_metadata_can_run_no_code",
        *("engine/pieces.py", "if is_dtype or (module, name) in _CLASSES:", "if True:"),
        checkpoint="sharded",
    ),
    mutation(
        "parity lets BatchNorm take statistics where it holds them still",
        "test_parity.py::test_cause_is_measured[BatchNorm]",
        *("parity_ranks.py", "            part.eval()\n", "            part.train()\n"),
        checkpoint="sharded",
    ),
    mutation(
        "parity takes any random numbers for dropout",
        "test_parity.py::test_mistake_is_found",
        *("parity_report.py", " or is_unseeded(result.findings):", ":"),
        checkpoint="sharded",
    ),
    mutation(
        "each disk has buffers of its own in the model",
        "test_saving.py::test_each_disk_has_the_weights_and_what_is_its_ranks_own",
        *(
            "engine/strategy.py",
            "                stack.enter_context(rank0_buffers(module, self.world))\n",
            "                module.eval()\n",
        ),
        checkpoint="per_rank",
    ),
    mutation(
        "a disk drops its old checkpoint before all have the new one",
        "test_saving.py::test_crash_between_two_disks_goes_back_to_what_both_hold[0-publish]",
        *("engine/strategy.py", "lambda: publish(temporary)"),
        "lambda: (publish(temporary), retain(self.root, self._keep))",
        checkpoint="per_rank",
    ),
    mutation(
        "each disk goes on from its own newest checkpoint",
        "test_saving.py::test_newest_step_that_is_whole_on_all_disks[unlink]",
        *("engine/strategy.py", "set.intersection(*map(set, filled.values()))"),
        "set.union(*map(set, filled.values()))",
        *("engine/strategy.py", "if all(paths[rank] for rank in filled):", "if any(paths):"),
        checkpoint="per_rank",
    ),
    mutation(
        "ranks that drifted apart are saved",
        "test_saving.py::test_ranks_that_drifted_apart_are_not_saved",
        *("engine/strategy.py", "        require_same_weights(job)\n", ""),
        checkpoint="per_rank",
    ),
    # Levers.
    mutation(
        "a hook is registered before the throwaway pass",
        "test_comm_hook.py::test_bytes_that_a_step_sends[powersgd-432]",
        *("engine/ddp.py", "    _settle_buckets(model, loss_of)\n", ""),
        *("engine/ddp.py", "    return model\n\n\ndef _check_pass("),
        "    _settle_buckets(model, loss_of)\n    return model\n\n\ndef _check_pass(",
    ),
    mutation(
        "PowerSGD remembers a gradient that was not finite",
        "test_comm_hook.py::test_powersgd_forgets_a_gradient_that_was_not_finite",
        *("engine/report.py", "        comm_hook.forget(job.model)\n", "        pass\n"),
    ),
    mutation(
        "moments keep the layout of the checkpoint",
        "test_levers.py::test_fused_step_is_the_same_step",
        *(
            "engine/optim.py",
            "    optimizer.register_load_state_dict_post_hook(_lay_out)\n",
            "",
        ),
    ),
    mutation(
        "the checkpoint decides whether the step is fused",
        "test_levers.py::test_fused_step_is_the_same_step",
        *("engine/optim.py", '{**group, "fused": fused}', "{**group}"),
    ),
    mutation(
        "the averaged model sees images in another layout",
        "test_levers.py::test_channels_last_changes_the_layout_and_nothing_else",
        *("train.py", "moved = to_device(batch, device, job.dtype, job.memory_format)"),
        "moved = to_device(batch, device, job.dtype)",
    ),
    mutation(
        "too many shapes are trained uncompiled",
        "test_compile.py::test_nothing_goes_on_uncompiled_in_silence",
        *("engine/levers.py", "    settings.fail_on_recompile_limit_hit = True\n", ""),
    ),
    mutation(
        "the compiler is not tried before training",
        "test_compile.py::test_a_rank_without_a_compiler_is_refused_in_one_line",
        *("engine/levers.py", "        _check_compiler(world.device)\n", "        pass\n"),
    ),
    # Stops.
    mutation(
        "a signal is handled without agreement",
        "test_agreement.py::test_no_rank_leaves_while_another_one_goes_on",
        *("engine/stop.py", "            self.is_agreed = self._is_named_window()\n"),
        "            self.is_agreed = True\n",
    ),
    mutation(
        "rank 0 names the window that it is in",
        "test_agreement.py::test_no_rank_leaves_while_another_one_goes_on",
        *("engine/stop.py", "str(self._window + 1)", "str(self._window)"),
    ),
    mutation(
        "a rank that heard of a stop takes its own signal for a second one",
        "test_agreement.py::test_no_rank_leaves_while_another_one_goes_on",
        "engine/stop.py",
        "self._asked_at = self._looked_at  #",
        "pass  #",
    ),
    mutation(
        "an evaluation that was left counts as done",
        "test_stop.py::test_all_ranks_save_the_same_step_and_leave",
        *("train.py", "    if job.stop.is_agreed:\n        return None\n", ""),
    ),
    mutation(
        "a repeated signal ends a rank that is saving",
        "test_stop.py::test_all_ranks_save_the_same_step_and_leave",
        *("engine/stop.py", ">= _REPEATED_S:", ">= 0:"),
    ),
    # Going on after a fault.
    mutation(
        "a newer format is passed over like a damaged one",
        "test_checkpoint.py::test_newest_one_of_a_newer_format_is_not_left_behind",
        *("engine/choice.py", "if is_newest and isinstance(error, NewerFormat):", "if False:"),
    ),
    mutation(
        "a step that is saved again has no checkpoint meanwhile",
        "test_leftovers.py::test_crash_while_a_step_is_saved_again_loses_nothing",
        *("engine/checkpoint.py", "replaced = unname(final) if final.exists() else None"),
        "replaced = shutil.rmtree(final, ignore_errors=True)",
    ),
    mutation(
        "the data prepared by every process of a machine",
        "test_prepare.py::test_once_on_each_machine[1-by0]",
        *("engine/prepare.py", "    if world.local_rank == 0:\n", "    if True:\n"),
    ),
    mutation(
        "the data waited for in a collective, so no longer than its time-out",
        "test_prepare.py::test_others_wait_longer_than_the_timeout",
        *("engine/prepare.py", "    while leaders:\n", "    while False:\n"),
    ),
    mutation(
        "a restart meets what the one before has left in the launcher's store",
        "test_rendezvous.py::test_start_meets_nothing_of_the_one_before",
        *("engine/meeting.py", "_number(launch, store, limit) if is_kept else 0", "0"),
    ),
    mutation(
        "a restart goes back to the named checkpoint again",
        "test_attempts.py::test_restart_does_not_go_back_again[path-failures]",
        *("engine/attempts.py", '            answer = "auto"\n', "            pass\n"),
    ),
    mutation(
        "windows without a finite gradient are counted over a whole run",
        "test_nonfinite.py::test_windows_are_counted_afresh_after_a_step",
        *("engine/state.py", "        self.nonfinite = 0\n", ""),
    ),
    mutation(
        "the weight decay is the checkpoint's",
        "test_changes.py::test_weight_decay_is_the_configured_one",
        *("engine/state.py", '- {"lr"}', '- {"lr", "weight_decay"}'),
    ),
    # A rank that fails, a run that stands still.
    mutation(
        "peers bury the first failure",
        "test_failure.py::test_rank_that_fails_is_heard_and_the_others_say_that_they_left"
        "[data-at step 2 in data-0]",
        *("engine/failure.py", "        if cause is None:\n", "        if True:\n"),
    ),
    mutation(
        "who only lost a peer claims to have failed first",
        "test_failure.py::test_rank_that_is_killed_is_missed_in_one_line",
        *("engine/failure.py", "    if not is_loss_of_a_peer(error):\n", "    if True:\n"),
    ),
    mutation(
        "what all ranks raise is told by any of them",
        "test_failure.py::test_what_all_ranks_raise_is_told_once[disk]",
        *("engine/failure.py", "error.rank != world.rank:\n", "error.rank == world.rank:\n"),
    ),
    mutation(
        "compile counts as a stall",
        "test_watchdog.py::test_compiling_for_long_is_no_standstill",
        *(
            "engine/watchdog.py",
            "if signs != self._signs or is_compiling:",
            "if signs != self._signs:",
        ),
    ),
    mutation(
        "a rank that waits for one that works stands still",
        "test_standstill.py::test_long_evaluation_and_long_save_are_no_standstill",
        *("engine/watchdog.py", "return min([own, *others])", "return own"),
    ),
    mutation(
        "the watchdog waits for an answer of the store",
        "test_watchdog.py::test_store_that_does_not_answer_holds_nobody_up",
        *("engine/watchdog.py", "for thread in (*self._exchanges, self._thread):"),
        "[e.run() for e in self._exchanges]\n        for thread in [self._thread]:",
    ),
    # Who a process is, and where it meets the others.
    launching(
        "processes without a launcher all take the first device",
        "test_rendezvous.py::test_place_that_settings_give",
        *("engine/launch.py", '"local_rank": said["rank"]', '"local_rank": 0'),
    ),
    launching(
        "a setting overrules the launcher",
        "test_rendezvous.py::test_launcher_and_settings_must_agree",
        *(
            "engine/launch.py",
            "        if value != getattr(launch, name):\n",
            "        if False:\n",
        ),
    ),
    launching(
        "the addresses of an earlier run are met again",
        "test_rendezvous.py::test_file_that_has_been_used_is_refused",
        *(
            "engine/meeting.py",
            'if is_file and store.add(f"rank {launch.rank}", 1) > 1:',
            "if False:",
        ),
    ),
    launching(
        "the rank among all machines chooses the device",
        "test_distributed.py::test_device_of_each_rank",
        *("engine/distributed.py", "launch.local_rank % count", "launch.rank % count"),
    ),
    launching(
        "another system's own name is looked up",
        "test_platforms.py::test_what_can_train",
        "engine/platforms.py",
        'os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0")',
        "pass",
    ),
    # Several machines.
    launching(
        "all machines meet at a name that leads each to itself",
        "test_nodes.py::test_name_of_every_machine_itself_is_refused",
        *("engine/nodes.py", 'if address.startswith("127.") or address == "::1":', "if False:"),
    ),
    launching(
        "every machine keeps the store",
        "test_nodes.py::test_machine_at_which_all_meet_knows_it",
        *("engine/nodes.py", "own == address and is_free(port, run_id, settings))", "True)"),
    ),
    launching(
        "the interface that was set is not the one that is tried",
        "test_reach.py::test_address_is_that_of_the_interface",
        *(
            "engine/reach.py",
            'if names := os.environ.get("GLOO_SOCKET_IFNAME"):',
            'if names := "":',
        ),
    ),
    launching(
        "a machine tries its own door",
        "test_reach.py::test_each_machine_is_tried_once_by_another",
        *("engine/reach.py", "(problem := _knock(following))", "(problem := _knock(own))"),
    ),
    launching(
        "the machine of rank 0 goes by its own name",
        "test_route.py::test_machine_that_is_itself_by_that_name_looks_for_another",
        *("engine/route.py", "if _is_loopback(own):", "if False:"),
    ),
    launching(
        "a process that has ended keeps its launcher",
        "test_agent.py::test_process_counts_while_it_lives",
        *("engine/agent.py", ' and state != "Z"', ""),
    ),
    # Tasks of a cluster.
    launching(
        "the tasks of the job are taken for those of the step",
        "test_srun.py::test_task_of_a_step",
        *("engine/srun.py", '"WORLD_SIZE": "SLURM_STEP_NUM_TASKS"', '"WORLD_SIZE": "SLURM_NTASKS"'),
    ),
    launching(
        "the shell of a batch script takes a place",
        "test_srun.py::test_shell_of_the_job_is_one_process",
        "engine/srun.py",
        'os.environ.get("SLURM_STEP_NUM_TASKS", "1")',
        'os.environ.get("SLURM_STEP_NUM_TASKS", os.environ["SLURM_NTASKS"])',
    ),
    launching(
        "names of machines lose their zeros",
        "test_nodelist.py::test_list_is_spelt_out",
        *("engine/nodelist.py", "str(n).zfill(len(first))", "str(n)"),
    ),
    launching(
        "the end of an earlier start counts as this one's",
        "test_outcome.py::test_earlier_end_is_none",
        "engine/outcome.py",
        'is_old = datetime.fromisoformat(status["updated"]).timestamp() < since',
        "is_old = False",
    ),
    launching(
        "a start that did not come to training made progress",
        "test_outcome.py::test_start_that_did_not_come_to_training_made_no_step",
        *("engine/outcome.py", 'if float(last["started"]) >= since else 0', "if since else 0"),
    ),
]


@pytest.fixture
def copy_with(shared: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Give a copy of the project with this strategy; each project is rendered once in a run."""

    def copy(checkpoint: str) -> Path:
        pristine = shared / "mutated" / checkpoint / SLUG
        with FileLock(shared / "mutated.lock"):
            if not pristine.exists():
                with silent():
                    render(ANSWERS | {"checkpoint": checkpoint}, pristine.parent)
        return shutil.copytree(pristine, tmp_path / SLUG)

    return copy


@pytest.mark.parametrize("checkpoint", sorted({row.checkpoint for row in MUTATIONS}))
def test_their_tests_pass_without_a_fault(
    copy_with: Callable[[str], Path], server: Server, checkpoint: str
) -> None:
    caught_by = sorted({row.caught_by for row in MUTATIONS if row.checkpoint == checkpoint})
    code, output = server.call(copy_with(checkpoint), run_own_tests, *caught_by)
    assert code == 0, output


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in MUTATIONS])
def test_fault_is_caught(
    copy_with: Callable[[str], Path], server: Server, row: Mutation, count: Count
) -> None:
    project = copy_with(row.checkpoint)
    for name, old, new in row.edits:
        file = project / SLUG / name
        text = file.read_text()
        assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
        file.write_text(text.replace(old, new))
    code, output = server.call(project, run_own_tests, row.caught_by)
    assert code == 1, output
    assert "1 failed" in output, output
    count("mutations caught", 1)
