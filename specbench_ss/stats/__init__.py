"""Statistics of paired measurements: sums by question, and intervals. Nothing here has methods, suites or reports."""
