"""A load generator for any OpenAI-compatible server: what to send and when, sending it, and what came of it."""
