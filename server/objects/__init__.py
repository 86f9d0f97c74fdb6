"""What stored documents and schemas share: the store, routes, precomputed KV, pins."""
