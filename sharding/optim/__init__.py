"""Optimizers over flat shards, and what people do to gradients before their steps."""
