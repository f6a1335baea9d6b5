"""Number formats, one per file."""
