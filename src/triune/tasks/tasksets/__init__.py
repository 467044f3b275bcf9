"""Task sets, one kind a file."""
