"""All that a backend author reads: what a backend declares, is handed, and may override."""
