"""Flat optimizers, and the L2 norm."""
