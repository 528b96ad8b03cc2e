"""UNO: a LoRA of the frozen target that drafts in rows of noise."""
