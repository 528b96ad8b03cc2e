"""Drafts copied from what the request has already said: no model, no training."""
