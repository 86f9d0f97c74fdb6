"""Events of KV that enters or leaves the cache, for routers and other consumers."""
