"""Read and write weights in the layouts that other programs use."""
