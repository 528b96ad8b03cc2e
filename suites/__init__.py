"""Tasks with their prompts, references and scorers. The suites know the core; the core does not know them."""
