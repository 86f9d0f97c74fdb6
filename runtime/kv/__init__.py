"""The paged pool, its pages, and who owns them."""
