"""Documents: their store and routes, and how requests name them."""
