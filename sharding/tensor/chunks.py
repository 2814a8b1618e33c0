"""How `torch.distributed.checkpoint` reads and writes one rank's part of a tensor: as boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...buffers.boxes import Box, interval_boxes

# Only checkpoints need them at run time, and they take longer to import than all of sidestream.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class CheckpointChunks:
    """Mixed into a tensor class: the protocol of checkpointable tensors over `local`, the elements
    of a tensor of `shape` from `start` on.
    """

    local: Tensor
    start: int
    shape: torch.Size

    def describe(self) -> str:
        """The tensor in a few words, for messages."""
        raise NotImplementedError

    def require_one_value(self, caller: object) -> None:
        """Refuse what is not one tensor to all ranks."""
        raise NotImplementedError

    def boxes(self) -> tuple[Box, ...]:
        """Those of the whole tensor that this rank holds."""
        if self.shape.numel() == 0:
            # No elements to write, yet a checkpoint must list the name and shape.
            return (Box((0,) * len(self.shape), tuple(self.shape), 0, 0),)
        return interval_boxes(tuple(self.shape), self.start, self.start + self.local.numel())

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        """One item per box (protocol of torch.distributed.checkpoint); replicas are equal items."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes that this rank holds and somebody is about to fill (protocol of
        torch.distributed.checkpoint, which asks for them before it loads).
        """
        # Replicated parameters are gathered anew after a write, by all ranks, and a rank that holds
        # no elements would not be written to.
        increment_version(self.local)
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self.require_one_value("torch.distributed.checkpoint")
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in self.boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The view of `local` in the shape of the box at `index.offset`.

        Raises:
            ValueError: this rank holds no box that starts there.
        """
        for box in self.boxes():
            if index.offset is not None and box.offsets == tuple(index.offset):
                return self.view_of(box)
        raise ValueError(f"{self.describe()}: expected the offset of one of its boxes, got {index}")

    def view_of(self, box: Box) -> Tensor:
        """The elements of `box`, one of `boxes`, in its shape; writing to it writes to `local`."""
        return self.local[box.flat_start : box.flat_start + box.numel].view(box.sizes)
