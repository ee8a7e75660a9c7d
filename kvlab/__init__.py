"""kvlab: one logical K/V sequence, held exactly in physical memory, in code that runs."""

__version__ = "0.1.0"
