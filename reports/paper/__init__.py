"""Tables and figures of the two papers, measured again next to the published numbers."""
