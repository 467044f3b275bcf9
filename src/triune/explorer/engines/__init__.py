"""Engines sample tokens: `embedded` in this process, `remote` at an OpenAI-compatible endpoint. One brick a file."""
