"""Routes of operators: the cache, the page, metrics."""
