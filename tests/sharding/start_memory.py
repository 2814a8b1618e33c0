"""How much memory a start takes: the peak on each rank above what it held before the model, as a
share of the weights. `python -m sidestream.tests.sharding.start_memory` prints it for all ways.

The model is like Llama, of 172 MiB in FP32, and each rank is a fresh process. What counts is memory
of the process itself: pages of a mapped file belong to the system's cache.
"""

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks

VOCAB, WIDTH, HIDDEN, LAYERS = 7000, 512, 1376, 12
UNPOISONED = {"SIDESTREAM_TEST_POISON": "0"}  # filling memory would make it resident
SAMPLE_S = 0.0005
SEED, FILES_SEED = 0, 1
STATE_DICT, SAFETENSORS = "model.pt", "model.safetensors"


class Layer(nn.Module):
    """The parameters of a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """All parameters are used; attention, which has none, is left out."""
        inner = self.norm(x)
        x = x + self.out(self.query(inner) + self.key(inner) + self.value(inner))
        inner = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))


class Model(nn.Module):
    """Embedding, layers, norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, VOCAB] of int64 `tokens` [batch, length]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def weights_bytes() -> int:
    """Of the whole model."""
    with torch.device("meta"):
        return sum(param.nbytes for param in Model().parameters())


def _own_bytes() -> int:
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most bytes that this process had of its own in a `with` block, above its start."""

    def __enter__(self) -> "Peak":
        self.start = self.highest = _own_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.highest = max(self.highest, _own_bytes())

    def __exit__(self, *_: object) -> None:
        self.highest = max(self.highest, _own_bytes())
        self._ended.set()
        self._thread.join()

    @property
    def nbytes(self) -> int:
        """The peak above the start."""
        return self.highest - self.start


def _meta_model() -> Model:
    with torch.device("meta"):
        return Model()


def _shard(model: Model, **options: object) -> Model:
    ss.fully_shard(model, fsdp_unit_modules=[Layer], **options)
    return model


def _sharded_meta_model() -> Model:
    return _shard(_meta_model(), init_model_with_meta_device=True)


def _ordinary(_rank: int, _folder: Path) -> Model:
    return _shard(Model())


def _reset(_rank: int, _folder: Path) -> Model:
    return _sharded_meta_model()


def _rank_0_has_the_model(rank: int, _folder: Path) -> Model:
    model = _meta_model() if rank else Model()
    return _shard(model, init_model_with_meta_device=True)


def _rank_0_maps_a_state_dict(rank: int, folder: Path) -> Model:
    model = _sharded_meta_model()
    state = {} if rank else torch.load(folder / STATE_DICT, mmap=True, weights_only=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return model


def _safetensors(_rank: int, folder: Path) -> Model:
    model = _sharded_meta_model()
    ss.load_safetensors(folder / SAFETENSORS, model)
    return model


WAYS: dict[str, Callable[[int, Path], Model]] = {
    "every rank makes the model": _ordinary,
    "meta device, reset_parameters": _reset,
    "meta device but on rank 0, which makes the model": _rank_0_has_the_model,
    "meta device, state dict mapped by rank 0": _rank_0_maps_a_state_dict,
    "meta device, safetensors": _safetensors,
}


FROM_FILES = ("meta device, state dict mapped by rank 0", "meta device, safetensors")


def write_files(folder: Path) -> None:
    """Write what some of the ways read into `folder`."""
    torch.manual_seed(FILES_SEED)
    model = Model()
    torch.save(model.state_dict(), folder / STATE_DICT)
    ss.save_safetensors(folder / SAFETENSORS, model)


def peak_of(rank: int, _world_size: int, way: str, folder: str) -> float:
    """The share of the weights that `way` takes at most on this rank; what it starts with is
    checked.
    """
    torch.manual_seed(SEED)
    with Peak() as peak:
        model = WAYS[way](rank, Path(folder))
    torch.manual_seed(FILES_SEED if way in FROM_FILES else SEED)
    for (name, value), param in zip(Model().named_parameters(), model.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), value), name
    return peak.nbytes / weights_bytes()


def peaks(way: str, world_size: int, folder: Path) -> list[float]:
    """`peak_of` every rank."""
    return run_on_ranks(peak_of, world_size, way, str(folder), env=UNPOISONED, timeout_s=120)


def main() -> None:
    """Print the table."""
    print(f"peak above start / weights of {weights_bytes() / 2**20:.0f} MiB, 2 ranks")
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name))
        for way in WAYS:
            shares = "  ".join(
                f"rank {r} {p:4.0%}" for r, p in enumerate(peaks(way, 2, Path(name)))
            )
            print(f"{way:50} {shares}", flush=True)


if __name__ == "__main__":
    from sidestream.tests.sharding import start_memory

    start_memory.main()  # under a name by which ranks find it
