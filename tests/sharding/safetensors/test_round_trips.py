"""Tests of safetensors beside the package `safetensors`: same bits out and in, at any sharding."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sidestream as ss
from sidestream.sharding.safetensors import files as safetensors_files
from sidestream.sharding.safetensors import save as safetensors_save
from sidestream.tests.ranks import preload, run_on_ranks
from sidestream.tests.sharding.tensor.cuts import CUTS, sharded, values
from sidestream.tests.sharding.twins import Twins, square_loss

safetensors_torch = pytest.importorskip("safetensors.torch")
preload("safetensors.torch")
pytestmark = pytest.mark.timeout(120)

ONE_FILE = 10**9
SEVERAL_FILES = 300


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7, dtype=dtype)
        self.linear = nn.Linear(7, 7, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.to(self.linear.weight.dtype)))


class Odd(nn.Module):
    """Tied, frozen, 0-d, empty, integer and narrow tensors, and buffers that last and do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.blocks = nn.Sequential(Block(torch.float32), Block(torch.bfloat16))
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.float16))
        self.table = nn.Parameter(torch.randint(99, (3, 4)), requires_grad=False)
        self.register_buffer("mask", torch.rand(3, 3) > 0.5)
        self.register_buffer("turned", torch.randn(3, 4).t())
        self.register_buffer("gone", torch.randn(2), persistent=False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens)).float()
        return self.head(x * self.gain) + self.narrow.sum()


def make(seed: int, zero: int, compiles: bool = False, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = Odd()
    if compiles:
        model.blocks[0] = torch.compile(model.blocks[0])
    ss.fully_shard(model, fsdp_unit_modules=[Block], zero_dp_strategy=zero, **options)
    return model


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Tensors that are read, gathered and written in several pieces."""
    with (
        mock.patch.object(safetensors_files, "CHUNK_BYTES", 64),
        mock.patch.object(safetensors_save, "CHUNK_BYTES", 64),
        mock.patch.object(safetensors_save, "_LEAST_NUMEL", 3),
    ):
        yield


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        key.replace("_orig_mod.", ""): value for key, value in ss.full_state_dict(model).items()
    }


def stored_in(folder: Path) -> dict[str, Tensor]:
    """What the package reads."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found: dict[str, Tensor] = {}
    for name in names:
        tensors = safetensors_torch.load_file(folder / name)
        assert found.keys().isdisjoint(tensors)
        found |= tensors
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a
    )


def held(cut: str, seed: int) -> nn.Module:
    """Parameters of which four ranks hold what `cut` says."""
    module = nn.Module()
    for name, shape in {"long": (40, 31), "short": (5,), "one": (), "none": (0, 3)}.items():
        full = values(*shape, seed=seed)
        module.register_parameter(name, sharded(full, cut, name, is_parameter=True))
    return module


def check_cuts(rank: int, world_size: int, folder: Path) -> None:
    for pieces in (contextlib.nullcontext, small_pieces):
        for cut, other in zip(CUTS, [*CUTS][::-1], strict=True):
            module = held(cut, seed=1)
            with pieces():
                ss.save_safetensors(folder, module)
                loaded = held(other, seed=2)
                ss.load_safetensors(folder, loaded)
            assert same(values_of(loaded), values_of(module))
            assert same(stored_in(folder), values_of(module)), cut


def test_ranks_that_hold_the_same_part_or_parts_in_another_order(tmp_path: Path) -> None:
    run_on_ranks(check_cuts, 4, tmp_path)


def check_round_trip(rank: int, world_size: int, folder: Path) -> None:
    tokens = torch.arange(11)
    for zero in range(4):
        path = folder / f"zero{zero}"
        limit = SEVERAL_FILES if zero % 2 else ONE_FILE
        model = make(seed=zero, zero=zero, compiles=world_size == 2 and zero == 3)
        expected = values_of(model)
        with small_pieces():
            ss.save_safetensors(path, model, max_shard_bytes=limit)
        untied = {name: value for name, value in expected.items() if name != "head.weight"}
        assert same(stored_in(path), untied), zero
        assert (path / "model.safetensors.index.json").exists() == (limit == SEVERAL_FILES)

        other = make(seed=9, zero=3 - zero)
        other(tokens)  # what is gathered is stale after the load
        before = other.gone.clone()
        with small_pieces():
            left_out = ss.load_safetensors(path, other)
        assert left_out == ([], [])
        assert same(values_of(other), expected), zero
        assert torch.equal(other.gone, before)
        other.eval(), model.eval()
        if world_size != 2 or zero != 3:  # calling it would compile it
            assert torch.equal(other(tokens), model(tokens)), zero


@pytest.mark.parametrize("world_size", [1, 2, 3, 4], ids=lambda n: f"world{n}")
def test_a_round_trip_keeps_every_bit(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(check_round_trip, world_size, tmp_path)


def test_a_plain_module_needs_no_process_group(tmp_path: Path) -> None:
    model, other = Odd(), Odd()
    ss.save_safetensors(tmp_path / "new" / "folder", model)
    assert ss.load_safetensors(tmp_path / "new" / "folder" / "model.safetensors", other) == ([], [])
    assert same(values_of(model), values_of(other))
    assert other.turned.stride() == (1, 4)


def save_part(rank: int, world_size: int, folder: Path) -> None:
    for zero in range(4):
        model, other = make(seed=0, zero=zero), make(seed=1, zero=3 - zero)
        ss.save_safetensors(folder, model.blocks[1])
        ss.load_safetensors(folder, other.blocks[1])
        expected = values_of(model.blocks[1])
        assert same(stored_in(folder), expected)
        assert same(values_of(other.blocks[1]), expected)


def test_a_part_of_a_sharded_model_is_a_model(tmp_path: Path) -> None:
    run_on_ranks(save_part, 2, tmp_path)


def train_on(rank: int, world_size: int, folder: Path) -> None:
    """Load between two steps; the steps after it are those of a plain model with these values."""
    torch.manual_seed(1)
    stored = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))
    if rank == 0:
        safetensors_torch.save_file(stored.state_dict(), folder / "model.safetensors")
    torch.distributed.barrier()
    for zero in range(4):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))
        twins = Twins(rank, world_size, model, zero, [nn.Linear])
        twins.train(square_loss, (4, 5), steps=1)
        ss.load_safetensors(folder, twins.sharded)
        twins.plain.load_state_dict(stored.state_dict())
        twins.train(square_loss, (4, 5), steps=2)


@pytest.mark.parametrize("world_size", [1, 2, 3], ids=lambda n: f"world{n}")
def test_training_goes_on_from_what_was_loaded(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(train_on, world_size, tmp_path)


def test_header_says_pt_and_tensors_are_aligned(tmp_path: Path) -> None:
    ss.save_safetensors(tmp_path, Odd())
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert length % 8 == 0
    widths = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "BOOL": 1}
    assert all(entry["data_offsets"][0] % widths[entry["dtype"]] == 0 for entry in header.values())


def load_of_package(rank: int, world_size: int, folder: Path, stored: dict[str, Tensor]) -> None:
    for zero in range(4):
        model = make(seed=1, zero=zero)
        ss.load_safetensors(folder / "model.safetensors", model)
        expected = {**stored, "head.weight": stored["embedding.weight"]}
        state = values_of(model)
        assert same(state, {name: value.to(state[name].dtype) for name, value in expected.items()})


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn], ids=str
)
def test_other_floating_dtypes_are_converted_as_torch_does(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in Odd().state_dict().items()
        if name != "head.weight"
    }
    stored["turned"] = stored["turned"].contiguous()
    safetensors_torch.save_file(stored, tmp_path / "model.safetensors")
    run_on_ranks(load_of_package, 2, tmp_path, stored)


def save_narrow(rank: int, world_size: int, folder: Path) -> None:
    for zero in (0, 3):
        model = make(seed=0, zero=zero)
        ss.save_safetensors(folder, model, dtype=torch.bfloat16)
        for name, value in stored_in(folder).items():
            whole = values_of(model)[name]
            expected = whole.to(torch.bfloat16) if whole.is_floating_point() else whole
            assert torch.equal(value, expected) and value.dtype == expected.dtype, name


def test_export_converts_floating_tensors_to_dtype(tmp_path: Path) -> None:
    run_on_ranks(save_narrow, 2, tmp_path)


def save_main(rank: int, world_size: int, folder: Path) -> None:
    policy = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = make(seed=0, zero=3, mixed_precision_policy=policy)
    ss.save_safetensors(folder, model)
    expected = values_of(model)
    assert all(torch.equal(value, expected[name]) for name, value in stored_in(folder).items())
    other = make(seed=1, zero=2, mixed_precision_policy=policy)
    ss.load_safetensors(folder, other)
    assert same(values_of(other), expected)


def test_main_parameters_are_what_is_stored(tmp_path: Path) -> None:
    run_on_ranks(save_main, 2, tmp_path)


def save_by_stage(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    stage = rank // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"]
    model = make(seed=stage, zero=3, device_mesh=mesh)
    if stage == 1:  # the other ranks take no part
        ss.save_safetensors(folder / "stage", model)
        other = make(seed=7, zero=1, device_mesh=mesh)
        ss.load_safetensors(folder / "stage", other)
        assert same(values_of(other), values_of(model))
    return values_of(model)


def test_only_the_ranks_of_a_module_take_part(tmp_path: Path) -> None:
    states = run_on_ranks(save_by_stage, 4, tmp_path)
    assert torch.equal(stored_in(tmp_path / "stage")["gain"], states[2]["gain"])
    assert torch.equal(
        stored_in(tmp_path / "stage")["embedding.weight"], states[2]["embedding.weight"]
    )


def check_transformers(rank: int, world_size: int, folder: Path) -> None:
    import warnings

    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    plain = LlamaForCausalLM(config)
    if rank == 0:
        plain.save_pretrained(folder / "theirs", max_shard_size="4KB")
    torch.distributed.barrier()
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    ss.fully_shard(model, fsdp_unit_modules=["LlamaDecoderLayer"])
    assert len([*(folder / "theirs").glob("model-*.safetensors")]) > 1
    ss.load_safetensors(folder / "theirs", model)
    expected = plain.state_dict()
    assert same(ss.full_state_dict(model), expected)
    for limit in (ONE_FILE, 4000):
        ours = folder / f"ours{limit}"
        if rank == 0:
            config.save_pretrained(ours)
        torch.distributed.barrier()
        ss.save_safetensors(ours, model, max_shard_bytes=limit)
        loaded, info = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert same(loaded.state_dict(), expected)


def test_transformers_reads_ours_and_we_read_theirs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_on_ranks(check_transformers, 2, tmp_path, env={"HF_HUB_OFFLINE": "1"})
