"""`goodrun top`: a run as it stands, on the terminal, live or replayed."""
