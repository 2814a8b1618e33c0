"""A transformers Llama with tied embeddings and activation checkpointing, in a loop of your own.

python examples/transformers_llama.py [FOLDER]                       one process
torchrun --nproc-per-node 2 examples/transformers_llama.py [FOLDER]  two ranks, on CPU or GPUs

Random weights, nothing is downloaded. FOLDER gets what `from_pretrained` of a plain Llama reads.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sidestream as ss

STEPS = 4


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


def batch(step: int, rank: int) -> torch.Tensor:
    """Token ids [2, 16], different for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 128, (2, 16), generator=generator)


def main(folder: str) -> None:
    """Train, write whole weights, generate."""
    model = build_model()
    model.activation_checkpointing_enable()  # `gradient_checkpointing_enable`, by its new name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ss.fully_shard(model, optimizer, fsdp_unit_modules=["LlamaDecoderLayer"], zero_dp_strategy=3)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for step in range(STEPS):
        tokens = batch(step, rank).to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        ss.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.7f}")
    state = ss.full_state_dict(model)  # all ranks take part
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
        print(f"saved whole weights to {folder}")
    # synced_gpus: at ZeRO-3 a rank that has its tokens goes on as long as others need its weights.
    model.eval()
    prompt = batch(0, rank)[:1, :4].to(model.device)
    synced = torch.distributed.is_initialized()
    tokens = model.generate(prompt, max_new_tokens=4 + rank, do_sample=False, synced_gpus=synced)
    if rank == 0:
        print(f"generated {tokens[0, 4:].tolist()}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "checkpoints/transformers_llama")
