"""The launches of one block for one new token of each sequence: `block_step.py` has each as a formula,
`triton_block_step.py` its kernel for a GPU."""
