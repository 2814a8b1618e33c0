import argparse
from dataclasses import fields

import pytest

from sidestream.training.errors import OptionsError
from sidestream.training.options import (
    DEFINING_OPTIONS,
    TrainOptions,
    add_train_arguments,
    options_from,
)


def _parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    return options_from(parser.parse_args(arguments))


def test_no_arguments_give_the_defaults():
    assert _parsed() == TrainOptions()


def test_every_option_can_be_given():
    line = (
        "--data d --model tiny --steps 9 --batch 4 --seq-len 32 --accumulate 2 --lr 0.5 --clip 0 "
        "--dropout 0.1 --seed 3 --nproc 2 --device cpu --zero 1 --compute bf16 --grad-wire bf16 "
        "--bucket-mib 0.5 --no-overlap --checkpoint c --checkpoint-every 4 --resume --json j "
        "--kill-at-step 5 --kill-rank 1 --heartbeat-limit-s 9 --keep-checkpoints 2 "
        "--dp-outer 2 --outer-strategy optim --ranks-per-node 2 --param-wire mxfp8 "
        "--nonfinite-grads skip --lr-schedule WSD --init-lr 0.1 --min-lr 0.2 --warmup-steps 2 "
        "--decay-steps 9 --wsd-decay-steps 3 --wsd-decay-style linear --weight-decay 0.2 "
        "--end-weight-decay 0.3 --weight-decay-steps 5 --weight-decay-style cosine "
        "--batch-ramp 0:4 --batch-ramp-unit tokens --metrics m --tensorboard t --timers --energy "
        "--graph --rerun --inject-fault bug --inject-fault-at 3 --inject-fault-rank 1"
    )
    options = _parsed(*line.split())
    given = {field.name for field in fields(options)}
    unchanged = {name for name in given if getattr(options, name) == getattr(TrainOptions(), name)}
    # Those of PyTorch's FSDP2 exclude others, or have one value.
    assert unchanged == {"use_torch_fsdp2", "ckpt_format", "gradient_accumulation_fusion", "pack"}


def test_defining_options_exist_and_leave_out_how_it_is_computed():
    assert set(TrainOptions(param_wire="mxfp8").defining()) < DEFINING_OPTIONS
    assert {"seed", "batch", "lr", "lr_schedule", "batch_ramp", "grad_wire"} <= DEFINING_OPTIONS
    assert None not in TrainOptions().defining().values(), "step files have texts and numbers"
    assert not DEFINING_OPTIONS & {"nproc", "zero", "bucket_mib", "no_overlap", "device"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--steps 0", "--steps >= 1, got 0"),
        ("--seed -1", "--seed >= 0, got -1"),
        ("--clip nan", "--clip >= 0, got nan"),
        (f"--seed {2**63}", f"--seed <= {2**63 - 1}, got {2**63}; pass a smaller number"),
        (f"--steps {2**31}", "--steps <= 2147483647, got 2147483648"),
        ("--lr 0", "--lr > 0, got 0"),
        ("--lr inf", "a finite --lr > 0, got inf"),
        ("--lr nan", "--lr > 0, got nan"),
        ("--dropout 1", "--dropout < 1, got 1"),
        ("--bucket-mib 0", "--bucket-mib > 0, got 0"),
        ("--bucket-mib inf", "a finite --bucket-mib > 0, got inf"),
        ("--resume", "--checkpoint DIR beside --resume"),
        ("--checkpoint-every 5", "--checkpoint DIR beside --checkpoint-every"),
        ("--keep-checkpoints 0", "--keep-checkpoints >= 1, got 0"),
        ("--keep-checkpoints 1", "--checkpoint DIR beside --keep-checkpoints"),
        ("--heartbeat-limit-s 2", "--heartbeat-limit-s >= 3, or 0 for never, got 2"),
        ("--heartbeat-limit-s -1", "--heartbeat-limit-s >= 0, got -1"),
        ("--heartbeat-limit-s nan", "--heartbeat-limit-s >= 0, got nan"),
        ("--kill-rank 0", "--kill-at-step K beside --kill-rank"),
        ("--kill-at-step 9 --steps 8", "--kill-at-step <= --steps 8, got 9"),
        ("--inject-fault bug --inject-fault-at 201", "--inject-fault-at <= --steps 200, got 201"),
        ("--dp-outer 0", "--dp-outer >= 1, got 0"),
        ("--ranks-per-node 0", "--ranks-per-node >= 1, got 0"),
        ("--rerun", "--checkpoint DIR beside --rerun"),
        ("--inject-fault bug --inject-fault-at 9 --steps 8", "<= --steps 8, got 9"),
        ("--pack --graph", "no --pack beside --graph"),
        ("--outer-strategy optim", "--dp-outer of at least 2 beside --outer-strategy optim, got 1"),
    ],
    ids=lambda value: value.split(" ")[0].strip("-") if value.startswith("--") else None,
)
def test_impossible_options_are_refused(arguments, expected):
    with pytest.raises(OptionsError, match=expected):
        _parsed(*arguments.split())


MEGATRON = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist"


def test_the_flags_that_megatron_wants_beside_fsdp2_are_taken():
    options = _parsed(*MEGATRON.split(), "--dp-outer", "2", "--compute", "bf16")
    assert options == TrainOptions(use_torch_fsdp2=True, dp_outer=2, compute="bf16")
    assert options.defining() == TrainOptions(compute="bf16").defining()


@pytest.mark.parametrize(
    ("arguments", "reason", "fix"),
    [
        ("--gradient-accumulation-fusion", "no layer of this model", "pass the former"),
        (f"{MEGATRON} --gradient-accumulation-fusion", "hands it none", "pass the former"),
        ("--ckpt-format zarr", "torch.distributed.checkpoint's", "pass torch_dist"),
        (f"{MEGATRON} --ckpt-format torch", "FSDP2's too", "pass torch_dist"),
        (f"{MEGATRON} --zero 2", "got 2: it shards", "leave one of them out"),
        (f"{MEGATRON} --grad-wire fp8", "got fp8: it sums gradients in FP32", "leave one"),
        (f"{MEGATRON} --param-wire fp8", "got fp8: it gathers weights", "leave one"),
        (f"{MEGATRON} --bucket-mib 1", "got 1.0: it exchanges units", "leave one"),
        (f"{MEGATRON} --no-overlap", "got True: it always overlaps", "leave one"),
        (f"{MEGATRON} --ranks-per-node 2", "got 2: its backend chooses", "leave one"),
        (f"{MEGATRON} --nonfinite-grads skip", "got skip: it looks at no", "leave one"),
        (f"{MEGATRON} --dp-outer 2 --outer-strategy optim", "share nothing", "leave one"),
    ],
    ids=lambda value: value.replace(MEGATRON, "fsdp2") if value.startswith("--") else "",
)
def test_what_fsdp2_cannot_do_is_refused_with_the_reason_and_the_fix(arguments, reason, fix):
    with pytest.raises(OptionsError, match=f"^expected .*{reason}.*; .*{fix}"):
        _parsed(*arguments.split())


@pytest.mark.parametrize("name", ["data", "checkpoint", "json"])
def test_empty_paths_are_refused(name):
    with pytest.raises(OptionsError, match=f"a path for --{name}, got ''; name it or leave it out"):
        _parsed(f"--{name}", "")


def test_no_clipping_can_be_said_as_infinity():
    assert _parsed("--clip", "inf").clip == float("inf")


@pytest.mark.parametrize("name", ["model", "device", "zero", "compute", "grad_wire", "param_wire"])
def test_unknown_choices_are_refused_with_those_known(name):
    flag = name.replace("_", "-")
    with pytest.raises(OptionsError, match=f"--{flag} among .*, got 'other'"):
        TrainOptions(**{name: "other"})
