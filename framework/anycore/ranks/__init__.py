"""Several processes that compute one model together: tensor parallelism, with the same engine in each."""
