"""What a run is: configuration, suite, rows, directory, manifest, preset."""
