"""What the compiler makes of a case for a GPU that need not be here: compile, count, measure."""
