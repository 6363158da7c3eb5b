"""Plugs rollouts into trainers and loggers of others."""
