"""Side-by-side runs against other systems; each prints a table."""
