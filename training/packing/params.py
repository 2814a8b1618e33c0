"""Where the documents of a packed row of tokens begin and end.

    tokens        a a a b b c c c c . .      three documents and two places of padding
    cu_seqlens    0     3   5       9   11
    seq_idx       0 0 0 1 1 2 2 2 2 3 3
    position_ids  0 1 2 0 1 0 1 2 3 0 1

Every place belongs to a document. Padding is one too, which nothing is learned from: attention
kernels leave what belongs to none unwritten, and a NaN there would reach the weights' gradients.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

MAX_TOKENS = 2**31 - 1


class Kept:
    """What was made once for a batch, by name: masks. All copies of one `PackedSeqParams` share
    it: `fully_shard`, ours and torch's, hands each unit a copy of what its forward is given.
    """

    def __init__(self) -> None:
        self._made: dict[object, Any] = {}

    def get(self, name: object, make: Callable[[], Any]) -> Any:
        """Return what has this name, made by `make` where it is the first to ask."""
        if torch.compiler.is_compiling():
            return make()
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSeqParams:
    """The documents of a row of `total_tokens` tokens, which attend to themselves alone.

        PackedSeqParams.from_lengths([3, 2, 4, 2])

    Field names are Megatron-Core's. Its `_padded` offsets and `pad_between_seqs` have no place
    here, where padding is documents, and those of context parallelism none either.

    cu_seqlens_q: int32 [documents + 1], starts at 0, does not decrease, ends at `total_tokens`.
    cu_seqlens_kv, max_seqlen_kv: the same as of the queries; may be left out.
    max_seqlen_q: no document is longer. total_tokens: may be left out where the host knows the
    offsets. seq_idx: int32 [1, total_tokens], the number of each token's document; made if left
    out. host_offsets: cu_seqlens_q as the host knows it, on the CPU; the same where that is there.
    kept: masks that were made for these documents, which copies share; leave it out.

    Offsets that the host knows are checked at once. Those that a GPU alone knows are checked there,
    without a wait: a false one ends the process by a device-side assertion.

    Raises:
        TypeError: no tensor, or no integer, where one is expected.
        ValueError: the fields contradict one another or the above.
    """

    cu_seqlens_q: Tensor
    max_seqlen_q: int
    cu_seqlens_kv: Tensor | None = None
    max_seqlen_kv: int | None = None
    qkv_format: str = "thd"
    total_tokens: int | None = None
    seq_idx: Tensor | None = None
    host_offsets: Tensor | None = None
    kept: Kept = field(default_factory=Kept, repr=False)

    def __post_init__(self) -> None:
        """Check, and derive what was left out."""
        self._check_form()
        self._set("cu_seqlens_kv", self.cu_seqlens_q)
        self._set("max_seqlen_kv", self.max_seqlen_q)
        if self.cu_seqlens_q.device.type == "cpu":
            self._set("host_offsets", self.cu_seqlens_q)
        if self.host_offsets is not None:
            self._check_values(self.host_offsets.tolist())
        elif self.total_tokens is None:
            raise ValueError(
                f"expected total_tokens beside offsets on {self.cu_seqlens_q.device}, got None, "
                "and reading them would wait for the device; pass the number of tokens of the row"
            )
        else:
            self._assert_on_device()
        if self.seq_idx is None:
            self._set("seq_idx", self._document_of_each_token())
        self._check_seq_idx()

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], *, max_seqlen: int | None = None
    ) -> "PackedSeqParams":
        """Return, on the CPU, the params of documents of these lengths in this order. `max_seqlen`
        stands for the longest of them, so that it is the same for every batch.

        Raises:
            TypeError: a length is no integer.
            ValueError: a length is negative or above `max_seqlen`, or 2^31 tokens or more.
        """
        lengths = list(map(operator.index, lengths))
        offsets = [0, *accumulate(lengths)]
        if max(offsets) > MAX_TOKENS:
            raise ValueError(
                f"expected at most {MAX_TOKENS} tokens, which int32 offsets can count, got "
                f"{max(offsets)}; make smaller batches"
            )
        return cls(
            cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32),
            max_seqlen_q=max(lengths, default=0) if max_seqlen is None else max_seqlen,
        )

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Tokens of each document, if the host knows them."""
        if self.host_offsets is None:
            return None
        return tuple(end - start for start, end in pairwise(self.host_offsets.tolist()))

    @property
    def position_ids(self) -> Tensor:
        """Place of each token in its document: int64 [1, total_tokens]."""
        assert self.seq_idx is not None, "made by __post_init__"
        return self._arange() - self.cu_seqlens_q[self.seq_idx].long()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedSeqParams":
        """Return the same on `device`; what is known of it on the host stays known."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedSeqParams":
        """Return the same in pinned memory, from which copies to a GPU need no wait."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> "PackedSeqParams":
        assert self.seq_idx is not None, "made by __post_init__"
        return replace(
            self,
            cu_seqlens_q=function(self.cu_seqlens_q),
            cu_seqlens_kv=None,
            seq_idx=function(self.seq_idx),
            kept=Kept(),
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _arange(self) -> Tensor:
        assert self.total_tokens is not None, "checked by __post_init__"
        return torch.arange(self.total_tokens, device=self.cu_seqlens_q.device)[None]

    def _document_of_each_token(self) -> Tensor:
        ends = self.cu_seqlens_q[1:]
        return torch.searchsorted(ends, self._arange(), right=True, out_int32=True)

    def _check_form(self) -> None:
        offsets = self.cu_seqlens_q
        if not isinstance(offsets, Tensor):
            raise TypeError(
                f"expected cu_seqlens_q int32 [documents + 1], got {type(offsets).__name__}; use "
                "PackedSeqParams.from_lengths"
            )
        self._set("max_seqlen_q", operator.index(self.max_seqlen_q))
        if self.qkv_format != "thd":
            raise ValueError(
                f"expected qkv_format 'thd', the packed one, got {self.qkv_format!r}; leave it out"
            )
        if offsets.dtype != torch.int32 or offsets.dim() != 1 or not offsets.numel():
            raise ValueError(
                "expected cu_seqlens_q int32 [documents + 1], got "
                f"{offsets.dtype} {list(offsets.shape)}; use PackedSeqParams.from_lengths"
            )
        if self.cu_seqlens_kv is not None and self.cu_seqlens_kv is not offsets:
            raise ValueError(
                "expected cu_seqlens_kv to be the tensor cu_seqlens_q, since documents attend to "
                "themselves alone, got another one; leave it out"
            )
        if self.max_seqlen_kv not in (None, self.max_seqlen_q):
            raise ValueError(
                f"expected max_seqlen_kv to be max_seqlen_q, {self.max_seqlen_q}, got "
                f"{self.max_seqlen_kv}; leave it out"
            )

    def _check_values(self, offsets: list[int]) -> None:
        if offsets[0]:
            raise ValueError(
                f"expected cu_seqlens_q to start at 0, got {offsets[0]}; put a 0 before the ends"
            )
        for document, (start, end) in enumerate(pairwise(offsets)):
            length = end - start
            if not 0 <= length <= self.max_seqlen_q:
                raise ValueError(
                    f"expected documents of 0 to max_seqlen_q = {self.max_seqlen_q} tokens, got "
                    f"{length} in document {document}; give cu_seqlens_q that do not decrease and "
                    "the length of the longest"
                )
        if self.total_tokens not in (None, offsets[-1]):
            raise ValueError(
                f"expected total_tokens {offsets[-1]}, where cu_seqlens_q ends, got "
                f"{self.total_tokens}; make the padding a document of its own"
            )
        self._set("total_tokens", offsets[-1])

    def _assert_on_device(self) -> None:
        lengths = self.cu_seqlens_q.diff()
        fit = (lengths >= 0) & (lengths <= self.max_seqlen_q)
        ends = (self.cu_seqlens_q[0] == 0) & (self.cu_seqlens_q[-1] == self.total_tokens)
        torch._assert_async(
            fit.all() & ends,
            "expected cu_seqlens_q from 0 to total_tokens in steps of 0 to max_seqlen_q",
        )

    def _check_seq_idx(self) -> None:
        seq_idx = self.seq_idx
        assert seq_idx is not None, "made before"
        if seq_idx.dtype != torch.int32 or seq_idx.shape != (1, self.total_tokens):
            raise ValueError(
                f"expected seq_idx int32 [1, {self.total_tokens}], got {seq_idx.dtype} "
                f"{list(seq_idx.shape)}; leave it out"
            )
        if seq_idx.device != self.cu_seqlens_q.device:
            raise ValueError(
                f"expected seq_idx on {self.cu_seqlens_q.device}, where cu_seqlens_q is, got "
                f"{seq_idx.device}; move both with .to(device)"
            )
        # Elsewhere the host would wait for the answer.
        if seq_idx.is_cpu and not torch.equal(seq_idx, self._document_of_each_token()):
            raise ValueError(
                "expected seq_idx to number each token's document as cu_seqlens_q has them, from "
                "0, got other numbers; leave it out"
            )
