"""Tests of the Trainer of transformers over sharded models, beside the plain one with DDP."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sidestream as ss
from sidestream.tests.integrations.launched import as_if_launched
from sidestream.tests.ranks import RanksFailed, preload, run_on_ranks

pytest.importorskip("transformers", reason="needs the extra `examples`")
pytest.importorskip("accelerate", reason="needs the extra `examples`")
pytestmark = pytest.mark.slow
preload("transformers.models.llama.modeling_llama", "transformers.trainer", "peft")

STEPS, RESUMED = 6, 3
# Of one rank the levels differ by whether parameters are freed alone.
LEVELS = {1: (3,), 2: range(4), 3: (1,)}


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def _peft_model() -> Any:
    from peft import LoraConfig, get_peft_model

    model = _model()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def _texts(count: int) -> list[dict[str, list[int]]]:
    tokens = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(7))
    labels = tokens.clone()
    labels[::3, 4:] = -100  # batches of different weight
    pairs = zip(tokens.tolist(), labels.tolist(), strict=True)
    return [{"input_ids": text, "labels": label} for text, label in pairs]


def _trainer(
    folder: Path,
    model: Any,
    zero: int | None,
    *,
    sharding: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A SidestreamTrainer of ZeRO level `zero`, or the plain Trainer for None."""
    from transformers import Trainer, TrainingArguments

    from sidestream.integrations.transformers import SidestreamTrainer

    defaults = {
        "max_steps": STEPS,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": RESUMED,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "activation_checkpointing": True,
    }
    arguments = TrainingArguments(
        str(folder), **{**defaults, **options}, use_cpu=True, report_to="none", disable_tqdm=True
    )
    data = {"train_dataset": _texts(60), "eval_dataset": _texts(10)}
    if zero is None:
        return Trainer(model, arguments, **data)
    sharding = {"zero_dp_strategy": zero, **(sharding or {})}
    return SidestreamTrainer(model, arguments, **data, sharding=sharding)


def _history(trainer: Any) -> list[float]:
    """Losses, norms and evaluations of all steps, in order."""
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


def _weights(trainer: Any) -> dict[str, Tensor]:
    return ss.full_state_dict(trainer.model)


def _check_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=name)


def _check_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def _trains_and_resumes(rank: int, world_size: int, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    as_if_launched(rank, world_size)
    plain = _trainer(folder, _model(), None)
    plain.train()
    saves = {"save_strategy": "steps", "save_steps": RESUMED}
    first: dict[str, Tensor] = {}
    for zero in LEVELS[world_size]:
        trainer = _trainer(folder / f"{zero}", _model(), zero, **saves)
        trainer.train()
        assert trainer.args.world_size == world_size
        torch.testing.assert_close(_history(trainer), _history(plain), rtol=1e-5, atol=1e-6)
        _check_close(_weights(trainer), _weights(plain), 1e-5)
        first = first or _weights(trainer)
        _check_equal(_weights(trainer), first)
        # At another level than it was saved at.
        again = _trainer(folder / "again", _model(), 3 - zero, **saves)
        again.train(resume_from_checkpoint=str(folder / f"{zero}" / f"checkpoint-{RESUMED}"))
        _check_equal(_weights(again), first)
        assert _history(again) == _history(trainer)
        trainer.save_model(str(folder / "final"))
        torch.distributed.barrier()
        loaded = LlamaForCausalLM.from_pretrained(folder / "final")
        _check_equal(loaded.state_dict(), first)
        # transformers is told that the ranks need each other, so uneven lengths end.
        prompt = torch.tensor([[1, 2, 3]])
        tokens = trainer.model.generate(prompt, max_new_tokens=2 + rank, do_sample=False)
        expected = loaded.generate(prompt, max_new_tokens=2 + rank, do_sample=False)
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("world_size", [1, 2, 3], ids="world{}".format)
def test_trains_saves_and_resumes_as_the_plain_trainer(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(_trains_and_resumes, world_size, tmp_path, timeout_s=110)


def _autocasts(rank: int, world_size: int, folder: Path) -> None:
    as_if_launched(rank, world_size)
    options = {"max_steps": 3, "eval_strategy": "no"}
    plain = _trainer(folder, _model(), None, bf16=True, **options)
    plain.train()
    fp32 = _trainer(folder, _model(), None, **options)
    fp32.train()
    for zero in (0, 3):
        trainer = _trainer(folder, _model(), zero, bf16=True, **options)
        trainer.train()
        # The same bf16 products, so far closer to each other than to fp32.
        torch.testing.assert_close(_history(trainer), _history(plain), rtol=1e-4, atol=1e-4)
    gap = max(abs(a - b) for a, b in zip(_history(plain), _history(fp32), strict=True))
    assert gap > 1e-4


def test_bf16_is_the_trainers_own_autocast(tmp_path: Path) -> None:
    run_on_ranks(_autocasts, 2, tmp_path)


def _trains_adapters(rank: int, world_size: int, folder: Path) -> None:
    from peft import PeftModel

    as_if_launched(rank, world_size)
    options = {"activation_checkpointing": False}
    plain = _trainer(folder, _peft_model(), None, **options)
    plain.train()
    best = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": RESUMED}
    for zero in (0, 3):
        trainer = _trainer(folder / f"{zero}", _peft_model(), zero, **options, **best)
        trainer.train()
        torch.testing.assert_close(_history(trainer), _history(plain), rtol=1e-5, atol=1e-6)
        assert trainer.state.best_model_checkpoint is not None
        trainer.save_model(str(folder / "adapter"))
        torch.distributed.barrier()
        files = {path.name for path in (folder / "adapter").iterdir()}
        assert "adapter_model.safetensors" in files and "model.safetensors" not in files
        loaded = PeftModel.from_pretrained(_model(), folder / "adapter")
        _check_equal(loaded.state_dict(), _weights(trainer))
        again = _trainer(folder / f"{zero}", _peft_model(), zero, **options)
        again.train(resume_from_checkpoint=str(folder / f"{zero}" / f"checkpoint-{RESUMED}"))
        assert _history(again)[-4:] == _history(trainer)[-4:]
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder / "adapter")
        torch.distributed.barrier()


def test_adapters_of_peft_train_save_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the extra `examples`")
    run_on_ranks(_trains_adapters, 2, tmp_path)


def _evaluates_first_and_trains_twice(rank: int, world_size: int, folder: Path) -> None:
    as_if_launched(rank, world_size)
    options = {"max_steps": 2, "eval_strategy": "no"}
    plain = _trainer(folder, _model(), None, **options)
    plain.train()  # evaluated first, it would not be wrapped in DDP any more
    plain.train()
    for zero in (0, 3):
        trainer = _trainer(folder, _model(), zero, **options)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        trainer.train()
        _check_close(_weights(trainer), _weights(plain), 1e-5)
        assert trainer.evaluate()["eval_loss"] < before


def test_evaluates_before_training_and_trains_again(tmp_path: Path) -> None:
    run_on_ranks(_evaluates_first_and_trains_twice, 2, tmp_path)


def _refused(rank: int, world_size: int, folder: Path) -> list[str]:
    import os

    as_if_launched(rank, world_size)
    messages = []

    def note(kind: type[Exception], make: Any) -> None:
        with pytest.raises(kind) as caught:
            make()
        messages.append(str(caught.value))

    note(ValueError, lambda: _trainer(folder, _model(), 3, torch_compile=True))
    note(ValueError, lambda: _trainer(folder, _model(), 3, auto_find_batch_size=True))
    note(ValueError, lambda: _trainer(folder, ss.fully_shard_model(_model()), 3))
    plain = _trainer(folder, _model(), None, save_strategy="steps", save_steps=RESUMED)
    plain.train()
    resumed = str(folder / f"checkpoint-{RESUMED}")
    note(FileNotFoundError, lambda: _trainer(folder, _model(), 3).train(resumed))
    os.environ["WORLD_SIZE"] = "2"
    os.environ["LOCAL_RANK"] = "-1"
    os.environ["RANK"] = "-1"
    note(ValueError, lambda: _started_without_cpu(folder))
    return messages


def _started_without_cpu(folder: Path) -> Any:
    from transformers import TrainingArguments

    from sidestream.integrations.transformers import SidestreamTrainer

    return SidestreamTrainer(_model(), TrainingArguments(str(folder), report_to="none"))


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    (messages,) = run_on_ranks(_refused, 1, tmp_path)
    expected = ["torch_compile", "auto_find_batch_size", "not sharded yet", "another Trainer"]
    expected.append("use_cpu=True")
    for message, part in zip(messages, expected, strict=True):
        assert part in message


def _shards_over_some(rank: int, world_size: int, folder: Path) -> str:
    as_if_launched(rank, world_size)
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    trainer = _trainer(folder, _model(), 3, sharding={"device_mesh": mesh, "dp_shard_dim": "dp"})
    with pytest.raises(ValueError) as caught:
        trainer.train()
    return str(caught.value)


def test_data_are_not_shared_among_ranks_that_need_the_same(tmp_path: Path) -> None:
    for message in run_on_ranks(_shards_over_some, 2, tmp_path):
        assert "dimensions have all 2 ranks" in message and "got 1" in message


def _names_the_package(rank: int, world_size: int) -> None:
    import sys

    sys.modules["transformers"] = None  # type: ignore[assignment]
    import sidestream.integrations.transformers  # noqa: F401


def test_missing_package_is_named() -> None:
    with pytest.raises(RanksFailed, match=r"pip install 'sidestream\[examples\]'"):
        run_on_ranks(_names_the_package, 1, backend=None)
