"""Policies: history in, decision out."""
