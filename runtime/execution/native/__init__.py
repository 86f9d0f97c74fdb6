"""The native CPU path: a decoder step in one call of a small C++ library. The torch path is its reference."""
