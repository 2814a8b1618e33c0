"""Training a byte-level GPT on real text with sidestream: the model, the data, the loop, its ranks
and the command line.
"""
