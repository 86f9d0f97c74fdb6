"""Features: each is a folder with one door, and a line in `registry.py`. The core names none of them."""
