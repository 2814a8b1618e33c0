"""Many tensors to and from one flat buffer, and the sum of one row per rank."""
