"""The lab: the project's own small models, trained from nothing."""
