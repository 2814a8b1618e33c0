"""What a sharded tensor refuses because one rank's part is no memory of the whole tensor: its
storage, its address, a copy, a pickle.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

_WAY_OUT = (
    "since one rank's part alone is not the tensor: take whole tensors with "
    "full_state_dict(module), as in save_pretrained(folder, state_dict=full_state_dict(model)), "
    "safetensors' save_file(full_state_dict(model), path) or torch.save, or save with "
    "save_checkpoint"
)


class WithoutStorage:
    """Mixed into a tensor class, in front of it: `describe` says which tensor it is."""

    def describe(self) -> str:
        """The tensor in a few words, for messages."""
        raise NotImplementedError

    def _copy(self) -> Any:
        raise NotImplementedError

    def untyped_storage(self) -> NoReturn:
        """Refused: the whole tensor lies nowhere."""
        raise RuntimeError(self._no_memory("untyped_storage"))

    def storage(self) -> NoReturn:
        """Refused: the whole tensor lies nowhere."""
        raise RuntimeError(self._no_memory("storage"))

    def data_ptr(self) -> NoReturn:
        """Refused: the whole tensor lies nowhere."""
        raise RuntimeError(self._no_memory("data_ptr"))

    def share_memory_(self) -> NoReturn:
        """Refused: the memory of a unit's parameters is its own."""
        raise RuntimeError(
            f"share_memory_: {self.describe()} lies in memory that its unit manages, which cannot "
            "be moved; share the model before fully_shard"
        )

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: NumPy has no sharded arrays."""
        raise RuntimeError(self._no_values("numpy"))

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self._no_values("__array__"))

    def tolist(self) -> NoReturn:
        """Refused: this rank has only some of the values."""
        raise RuntimeError(self._no_values("tolist"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of this rank's part, such as of optimizer state; refused for parameters."""
        if isinstance(self, torch.nn.Parameter):
            raise TypeError(f"{self.describe()} cannot be copied, {_WAY_OUT}")
        return self._copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self.describe()} cannot be copied or pickled, {_WAY_OUT}")

    def _no_memory(self, method: str) -> str:
        return f"{method}: {self.describe()} has no memory of its own as a whole, {_WAY_OUT}"

    def _no_values(self, method: str) -> str:
        return (
            f"{method}: this rank holds only a part of {self.describe()}; take "
            f"full_tensor() on all ranks, or to_local() for the part, and then .detach().{method}()"
        )
