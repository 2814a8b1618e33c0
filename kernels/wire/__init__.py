"""Wire messages: many tensors packed in one format, unpacked, and summed over ranks."""
