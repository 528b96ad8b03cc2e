"""Decoder layers in their fastest form on a device: products, fused layers, kernels, attention."""
