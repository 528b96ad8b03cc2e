"""A served engine as the thing measured: questions sent over HTTP, answers streamed. docs/design/endpoint.md."""
