"""Records of a run: configuration, samples, directory, manifest and presets."""
