"""Operators that read each number once: activations, rotary positions, AdamW's update."""
