"""Paged attention, KV write and block copy for TPU; the modules here are imported where used."""
