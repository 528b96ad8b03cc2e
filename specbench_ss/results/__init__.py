"""From a run's rows to numbers and words."""
