"""Compiles every kernel for hardware that is not attached."""
