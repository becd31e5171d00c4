"""What each database does for a commit: lock and compare, write, commit, and tell what became of it."""
