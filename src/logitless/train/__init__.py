"""GRPO training from end to end: models, data and rewards, rollouts, updates, and the A/B between two losses.

Nothing here is imported by ``import logitless``: the losses need none of it. ``pip install 'logitless[train]'``.
"""
