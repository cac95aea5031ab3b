"""The version number; every other file reads this module."""

__version__ = "0.1.0"
