"""From conversations to rows that drafters learn from."""
