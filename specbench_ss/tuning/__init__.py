"""Choose a method's options by measurement on the device at hand. docs/design/tune.md gives the reasons."""
