"""Tables and figures of the two papers, made again beside the published numbers."""
