"""Several servers of Ramet behind routers, over HTTP."""
