"""What reads each number once: activations, rotary positions, AdamW's update."""
