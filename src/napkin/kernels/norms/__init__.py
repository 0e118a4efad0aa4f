"""RMSNorm and LayerNorm: plain, in compiled loops for a CPU, and fused with the residual addition for a GPU."""
