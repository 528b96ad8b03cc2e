"""Doing a run: what was asked, its checks, measuring. Usable without the command line."""
