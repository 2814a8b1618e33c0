"""Casts of matrices whose rows are sorted by group, as tokens by expert: all groups at once."""
