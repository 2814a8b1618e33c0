"""LoRA adapters of PEFT on a sharded Llama: train, save the adapter, merge it.

python examples/peft_lora.py [FOLDER]                       one process
torchrun --nproc-per-node 2 examples/peft_lora.py [FOLDER]  two ranks, on CPU or GPUs

Random weights, nothing is downloaded. FOLDER gets `base` and `merged`, which `from_pretrained` of a
plain Llama reads, and `adapter`, which `PeftModel.from_pretrained` does.
"""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import sidestream as ss

STEPS = 4


def build_model() -> PeftModel:
    """A frozen Llama of 2 layers with trainable adapters at the attention's projections."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapters)


def batch(step: int, rank: int) -> torch.Tensor:
    """Token ids [2, 16], different for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 128, (2, 16), generator=generator)


def plain_name(name: str) -> str:
    """The name that a parameter of the base model has without PEFT."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def main(folder: str) -> None:
    """Train the adapters, save them, merge them in place, save the merged weights."""
    model = build_model()
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
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
        model.save_pretrained(f"{folder}/adapter", state_dict=state)
        base = {plain_name(name): x for name, x in state.items() if "lora_" not in name}
        model.get_base_model().save_pretrained(f"{folder}/base", state_dict=base)
        print(f"saved the adapter to {folder}/adapter")
    # Merging reads and writes whole matrices: inside, they are there, and each rank keeps its part.
    with ss.gathered(model, write=True):
        model.merge_adapter()
    state = ss.full_state_dict(model)
    if rank == 0:
        merged = {plain_name(name): x for name, x in state.items() if "lora_" not in name}
        model.get_base_model().save_pretrained(f"{folder}/merged", state_dict=merged)
        print(f"saved the merged weights to {folder}/merged")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "checkpoints/peft_lora")
