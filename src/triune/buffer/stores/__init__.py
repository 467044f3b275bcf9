"""Bricks of kind `store`: where a buffer's database lives."""
