"""Converting: copying one storage into another, of any kind, and comparing the two."""
