"""Tasks, prompts, references and scorers. Knows the core; the core does not know it."""
