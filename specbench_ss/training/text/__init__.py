"""Turn conversations into the rows that drafters learn from."""
