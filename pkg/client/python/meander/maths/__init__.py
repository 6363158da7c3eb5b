"""Computes noise, transitions and reference losses in NumPy."""
