"""What leaves the launcher while a run goes on: Prometheus metrics, and a command for each event."""
