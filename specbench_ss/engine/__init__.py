"""The engine decodes one prompt: target, draft trees, verification, the loop. Nothing else is on the timed path."""
