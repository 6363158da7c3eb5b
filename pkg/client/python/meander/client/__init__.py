"""Talks to a pipeline: publishes prompts, reads rollouts, controls runs, pushes weights."""
