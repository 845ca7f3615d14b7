"""GGUF files: the header, and what it says as config.json, as names, as weights."""
