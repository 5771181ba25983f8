"""Stand-alone paged-attention kernels; they import jax and nothing of ours."""
