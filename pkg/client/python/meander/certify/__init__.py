"""A referee for engines and trainers, with or without a pipeline: python -m meander.certify.

What is measured is held against the formulas of public vectors. Where it differs, alternatives are derived from the
formula itself, and the simplest that explains every number is told.
"""
