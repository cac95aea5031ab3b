"""The fixtures of the trainer's tests."""

from train_micro import compile_cache, micro  # noqa: F401
