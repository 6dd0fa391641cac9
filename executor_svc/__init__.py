"""Owns the requests, the step clock, the model and the device KV pool."""
