"""The paged KV pool, its allocator, and the ownership of its pages."""
