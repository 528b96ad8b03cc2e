"""What a run consists of: its configuration, suite, rows, directory, manifest and presets."""
