"""Objectives from the settings of other libraries, under their own names (``Objective.from_trl`` and its like)."""
