"""The command line and the local supervisor: the only room that knows all the others."""

__version__ = "0.1.0"
