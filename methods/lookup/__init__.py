"""Methods that draft by looking up what followed the newest tokens before: no model, no training."""
