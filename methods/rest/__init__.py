"""REST: drafts retrieved from a datastore."""
