"""Fakes and small models for tests, ours and users'. Nothing outside tests imports this room."""
