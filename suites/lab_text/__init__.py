"""The lab's text: seeded generators of the conversations that the lab models learn and are measured on."""
