"""Adapters to other packages' trainers, a file for each package, which alone imports it."""
