"""Owns attention kernels beside their plain torch references, on tensors only; refuses memory, tables and models."""
