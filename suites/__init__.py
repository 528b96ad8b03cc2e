"""Suites: tasks with their prompts, references and scorers."""
