"""What a chat model's text means: its reasoning, its tool calls, and what it says."""
