"""Holds rollouts, texts and weights as events and files have them."""
