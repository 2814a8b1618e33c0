"""Tests of examples/: each as its reader runs it, on one rank and on two, beside a plain twin."""

import contextlib
import importlib.util
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sidestream.tests.integrations.launched import as_if_launched
from sidestream.tests.ranks import preload, run_on_ranks

preload("transformers.models.llama.modeling_llama", "transformers.trainer", "peft")
preload("lightning.pytorch")
pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
TORCHRUN += ("--rdzv-endpoint", "127.0.0.1:0")  # a free port


def _run(name: str, world_size: int, folder: Path) -> list[str]:
    """Run an example, with `folder` as its argument and where it starts; return its lines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return run_on_ranks(_main, world_size, name, folder, port, backend=None)[0]


def _main(rank: int, world_size: int, name: str, folder: Path, port: int) -> list[str]:
    """Be the example's program, started as by torchrun where there are several ranks."""
    if world_size > 1:
        as_if_launched(rank, world_size, port)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(folder)
    torch.manual_seed(0)
    sys.argv = [str(EXAMPLES / f"{name}.py"), str(folder / "out")]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return output.getvalue().splitlines()


def _run_by_torchrun(name: str, folder: Path) -> list[str]:
    """As `_run` on two ranks, in processes of torchrun that have loaded nothing before."""
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(EXAMPLES / f"{name}.py"), str(folder / "out")],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def _load(name: str) -> ModuleType:
    """The example as a module, in a process where other packages may warn."""
    warnings.simplefilter("ignore")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _losses(lines: list[str]) -> list[float]:
    """Of lines such as "step 1: loss 4.8"."""
    return [float(line.split("loss ")[1]) for line in lines if line.startswith("step ")]


def _check_close(got: Any, expected: dict[str, Tensor]) -> None:
    state = got.state_dict() if isinstance(got, nn.Module) else got
    assert sorted(state) == sorted(expected)
    for name, value in expected.items():
        # By norm: AdamW moves an element whose gradient is a rounding error by the learning rate.
        assert (state[name] - value).norm() <= 1e-4 * value.norm(), name


def _plain_steps(example: ModuleType, model: Any, world_size: int) -> list[float]:
    """Train as the example does, with every rank's data in turn; returns rank 0's losses."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for step in range(example.STEPS):
        for rank in range(world_size):
            tokens = example.batch(step, rank)
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / world_size).backward()
            losses += [loss.item()] if rank == 0 else []
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _check_llama(_rank: int, _size: int, world_size: int, lines: list[str], out: Path) -> None:
    from transformers import LlamaForCausalLM

    example = _load("transformers_llama")
    twin = example.build_model()
    torch.testing.assert_close(
        _losses(lines), _plain_steps(example, twin, world_size), rtol=1e-5, atol=1e-6
    )
    loaded = LlamaForCausalLM.from_pretrained(out)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    _check_close(loaded, twin.state_dict())
    tokens = loaded.generate(example.batch(0, 0)[:1, :4], max_new_tokens=4, do_sample=False)
    assert lines[-1] == f"generated {tokens[0, 4:].tolist()}"


def _check_peft(_rank: int, _size: int, world_size: int, lines: list[str], out: Path) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    example = _load("peft_lora")
    twin = example.build_model()
    torch.testing.assert_close(
        _losses(lines), _plain_steps(example, twin, world_size), rtol=1e-5, atol=1e-6
    )
    base = LlamaForCausalLM.from_pretrained(out / "base")
    adapted = PeftModel.from_pretrained(base, out / "adapter")
    _check_close(adapted, twin.state_dict())
    merged = LlamaForCausalLM.from_pretrained(out / "merged")
    expected = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in merged.state_dict().items())


def _check_trainer(_rank: int, _size: int, world_size: int, lines: list[str], out: Path) -> None:
    from transformers import LlamaForCausalLM, Trainer

    example = _load("transformers_trainer")
    arguments = example.arguments(str(out / "plain"))
    arguments.per_device_train_batch_size *= world_size
    arguments.save_strategy = "no"
    plain = Trainer(example.build_model(), arguments, train_dataset=example.dataset())
    plain.train()
    expected = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    (line,) = (line for line in lines if line.startswith("losses "))
    losses = [float(loss) for loss in line.split()[1:]]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert lines[-1] == "resumed after step 3: same bits True"
    _check_close(LlamaForCausalLM.from_pretrained(out / "final"), plain.model.state_dict())


def _check_lightning(_rank: int, _size: int, world_size: int, lines: list[str], out: Path) -> None:
    example = _load("lightning_strategy")
    batches, example.data = example.data, lambda size: batches(size * world_size)
    # One rank of DDP: where ranks are told apart, Lightning shuffles, in the same order for any.
    plain = example.fit(str(out / "plain"), "ddp")
    loaded = example.Regression.load_from_checkpoint(out / "epoch=1.ckpt")
    _check_close(loaded, plain.state_dict())
    assert lines[-2] == "resumed after the first epoch: same bits True"
    assert lines[-1].endswith("same bits True")


def _check_safetensors(
    _rank: int, _size: int, _world_size: int, lines: list[str], out: Path
) -> None:
    from safetensors.torch import load_model

    example = _load("safetensors_files")
    twin = example.build_model(0)
    tokens = torch.arange(16)
    nn.functional.cross_entropy(twin(tokens), tokens.flip(0)).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    loaded = example.build_model(1)
    assert load_model(loaded, out / "model.safetensors") == (set(), [])
    _check_close(loaded, twin.state_dict())
    assert lines[-1] == "imported into another sharded model: same outputs True"


def _check_megatron(_rank: int, _size: int, world_size: int, lines: list[str], out: Path) -> None:
    example = _load("megatron_training")
    twin = example.build_model(example.model_config("tiny", context=example.CONTEXT), seed=0)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=example.LEARNING_RATE)
    num_tokens = example.MICROBATCHES * example.ROWS * example.CONTEXT
    expected = []
    for step in range(example.STEPS):
        totals = [0.0] * world_size
        for rank in range(world_size):
            for microbatch in range(example.MICROBATCHES):
                loss = example.summed_loss(twin, *example.batch(step, microbatch, rank, world_size))
                (loss / (num_tokens * world_size)).backward()
                totals[rank] += loss.item()
        nn.utils.clip_grad_norm_(twin.parameters(), example.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        expected += [totals[0] / num_tokens] if step % 10 == 9 else []
    torch.testing.assert_close(_losses(lines), expected, rtol=1e-3, atol=1e-3)


def _plain_document_losses(example: ModuleType, batches: Any) -> list[float]:
    """Train on each document by itself, with every rank's in turn; returns the losses by step."""
    twin = example.build_model(example.model_config("tiny", context=example.CONTEXT), seed=0)
    optimizer = torch.optim.AdamW(twin.parameters())
    losses = []
    for step in range(1, example.STEPS + 1):
        begin, end = batches.consumed_before(step), batches.consumed_before(step + 1)
        bins = [example.PLAN.bins[number % len(example.PLAN.bins)] for number in range(begin, end)]
        documents = [example.DOCUMENTS[number] for bin_ in bins for number in bin_]
        total = sum(
            nn.functional.cross_entropy(twin(tokens[None, :-1])[0], tokens[1:], reduction="sum")
            for tokens in documents
        )
        loss = total / sum(len(tokens) - 1 for tokens in documents)
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        group, params = optimizer.param_groups[0], example.PARAMS.at(step)
        group["lr"], group["weight_decay"] = params.lr, params.weight_decay
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _check_support(_rank: int, _size: int, world_size: int, lines: list[str], out: Path) -> None:
    example = _load("training_support")
    metrics = out.parent / "metrics.jsonl"
    figures = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [each["step"] for each in figures] == list(range(1, example.STEPS + 1))
    calculator = example.schedules.MicrobatchCalculator(
        schedule=example.BATCHES, micro_batch_size=example.BINS, data_parallel_size=world_size
    )
    losses = [each["loss"] for each in figures]
    expected = _plain_document_losses(example, calculator)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    assert sum(line.startswith("energy of steps to ") for line in lines) == 2
    if world_size == 1:  # a run without a break has the same figures
        metrics.unlink()
        os.chdir(metrics.parent)
        example.train("memory://whole", example.STEPS)
        assert [json.loads(line) for line in metrics.read_text().splitlines()] == figures


def _check_quickstart(
    _rank: int, _size: int, _world_size: int, lines: list[str], out: Path
) -> None:
    losses = _losses(lines)
    assert losses[-1] < losses[0]
    assert (out.parent / "checkpoints" / "quickstart").is_dir()


CASES: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "lightning_strategy": (_check_lightning, ("lightning",)),
    "megatron_training": (_check_megatron, ()),
    "peft_lora": (_check_peft, ("transformers", "peft")),
    "quickstart": (_check_quickstart, ()),
    "safetensors_files": (_check_safetensors, ("safetensors",)),
    "training_support": (_check_support, ()),
    "transformers_llama": (_check_llama, ("transformers",)),
    "transformers_trainer": (_check_trainer, ("transformers", "accelerate")),
}


# Alone, the adapters are trained by their own tests.
RUNS = [(name, 2) for name in CASES] + [
    ("quickstart", 1),
    ("training_support", 1),
    ("transformers_llama", 1),
]


def test_every_example_has_a_case() -> None:
    assert sorted(CASES) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize(("name", "world_size"), RUNS, ids=lambda value: str(value))
def test_example_does_what_plain_pytorch_does(name: str, world_size: int, tmp_path: Path) -> None:
    check, packages = CASES[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, of the extra `examples`")
    lines = _run(name, world_size, tmp_path)
    run_on_ranks(check, 1, world_size, lines, tmp_path / "out", backend=None)


def test_an_example_runs_under_torchrun(tmp_path: Path) -> None:
    # Its weights are random, so nothing is known of the losses.
    assert len(_losses(_run_by_torchrun("quickstart", tmp_path))) == 4
    assert (tmp_path / "checkpoints" / "quickstart").is_dir()
