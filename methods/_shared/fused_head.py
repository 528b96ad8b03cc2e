"""When drafted states pass the LM head with the verified rows of the same pass, for all nodes, and when alone."""

from __future__ import annotations

# Rows, verified and drafted, up to which one product is cheaper than reading the LM head twice: SmolLM2, two cores with
# AVX-512 (docs/log.md).
MOST_FUSED = 9
