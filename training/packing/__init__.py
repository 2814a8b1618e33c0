"""Documents of any length in rows of a fixed budget of tokens, trained on without padding between.

    from sidestream.training.packing import pack, pack_batch

    plan = pack([len(document) for document in documents], budget=2048)
    batch = pack_batch(documents, plan).to("cuda")
    loss = batch.loss(model(batch.tokens, batch.params))

Which bin a document lies in is decided first (`pack`), then the bins are laid into one row of
tokens (`pack_batch`); `packed_attention` keeps the documents of the row apart.
"""

from .attention import AttentionCall, AttentionChoice, choose_attention, packed_attention
from .batch import IGNORED_TARGET, Document, PackedBatch, lay_out, pack_batch
from .masks import document_block_mask, document_mask
from .params import PackedSeqParams
from .plan import PackingPlan, Pieces, cut, pack

__all__ = [
    "IGNORED_TARGET",
    "AttentionCall",
    "AttentionChoice",
    "Document",
    "PackedBatch",
    "PackedSeqParams",
    "PackingPlan",
    "Pieces",
    "choose_attention",
    "cut",
    "document_block_mask",
    "document_mask",
    "lay_out",
    "pack",
    "pack_batch",
    "packed_attention",
]
