"""`anycore convert`: other people's files, legacy ones included, written anew as safetensors, quantised if asked."""
