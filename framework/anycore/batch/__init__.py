"""Batch files: a file of requests in, a file of answers out, by the server's own routes and without a port."""
