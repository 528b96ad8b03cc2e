"""Rating a run's answers by a model that judges, after the run: `ssbench judge`."""
