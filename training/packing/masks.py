"""Who may attend to whom in a packed row, as masks; each is made once for a batch."""

from typing import TYPE_CHECKING

from torch import Tensor

from .params import PackedSeqParams

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def document_mask(params: PackedSeqParams, *, causal: bool = True) -> Tensor:
    """Return bool [total_tokens, total_tokens]: row i attends to column j of its own document, with
    `causal` where j <= i.
    """

    def make() -> Tensor:
        assert params.seq_idx is not None, "made by __post_init__"
        same = params.seq_idx.mT == params.seq_idx
        return same.tril() if causal else same

    mask: Tensor = params.kept.get(("mask", causal), make)
    return mask


def document_block_mask(params: PackedSeqParams, *, causal: bool = True) -> "BlockMask":
    """Return the same for `torch.nn.attention.flex_attention`, which leaves out empty blocks."""
    # Half a second of import, for those alone who use it.
    from torch.nn.attention.flex_attention import create_block_mask

    assert params.seq_idx is not None, "made by __post_init__"
    document = params.seq_idx[0]

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document[query] == document[key]
        return same & (key <= query) if causal else same

    def make() -> "BlockMask":
        total = document.numel()
        return create_block_mask(sees, None, None, total, total, device=str(document.device))

    mask: BlockMask = params.kept.get(("block mask", causal), make)
    return mask
