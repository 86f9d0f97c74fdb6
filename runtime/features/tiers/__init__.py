"""Blocks of KV that outlive the pool: in host memory, on a disk, in a store that replicas share."""
