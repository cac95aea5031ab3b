"""Measurements: baselines, timing, memory."""
