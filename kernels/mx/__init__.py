"""MXFP8 and MXFP4: E8M0 scales for blocks of 32 elements."""
