"""Commands of `ramet` beside `serve`."""
