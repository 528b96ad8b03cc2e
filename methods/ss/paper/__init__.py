"""The tables and figures of the two Speculative Streaming papers as experiments: ours beside what was published.

ACL: the newer text; 2024: arXiv 2402.11131. An experiment that is a run goes through the core's runner.
"""
