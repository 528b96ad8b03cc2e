"""The bench makes a run: options, preflight, schedule, samples, telemetry."""
