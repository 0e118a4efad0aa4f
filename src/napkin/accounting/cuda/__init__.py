"""Counting a step for a CUDA device: its operators, its scratch memory, its caching allocator."""
