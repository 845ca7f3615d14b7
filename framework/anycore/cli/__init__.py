"""The command line: `anycore serve`, `chat`, `matrix` and so on, one module a sub-command."""
