"""The Trainer of transformers over a sharded model: train, save, resume, export.

python examples/transformers_trainer.py [FOLDER]                       one process
torchrun --nproc-per-node 2 examples/transformers_trainer.py [FOLDER]  two ranks, on CPU or GPUs

Random weights, nothing is downloaded. FOLDER gets the checkpoints, and whole weights in `final`.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import sidestream as ss
from sidestream.integrations.transformers import SidestreamTrainer


def build_model() -> LlamaForCausalLM:
    """A Llama of 2 layers whose head is its embedding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def dataset() -> list[dict[str, list[int]]]:
    """96 texts of 16 random tokens."""
    tokens = torch.randint(0, 128, (96, 16), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": text, "labels": text} for text in tokens]


def arguments(folder: str) -> TrainingArguments:
    """6 steps of 2 microbatches, a checkpoint after 3."""
    return TrainingArguments(
        folder,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        activation_checkpointing=True,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )


def main(folder: str) -> None:
    """Train; train again from the middle; compare the bits."""
    sharding = {"zero_dp_strategy": 3}  # the units are the model's decoder layers
    trainer = SidestreamTrainer(
        build_model(), arguments(folder), train_dataset=dataset(), sharding=sharding
    )
    trainer.train()
    trainer.save_model(f"{folder}/final")
    weights = ss.full_state_dict(trainer.model)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    again = SidestreamTrainer(
        build_model(), arguments(folder), train_dataset=dataset(), sharding=sharding
    )
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    resumed = ss.full_state_dict(again.model)
    same = all(torch.equal(weights[name], resumed[name]) for name in weights)
    if trainer.is_world_process_zero():
        print("losses " + " ".join(f"{loss:.7f}" for loss in losses))
        print(f"saved whole weights to {folder}/final")
        print(f"resumed after step 3: same bits {same}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "checkpoints/transformers_trainer")
