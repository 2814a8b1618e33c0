"""A parameter as users see it: of the whole shape, over this rank's part of the elements."""
