"""The cases of the kernel benchmark and how some of them are chosen: see `case` and `selection`."""
