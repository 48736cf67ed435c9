"""What a job of a given size will lose to failures: formulas, a simulation, and the `goodrun plan` that prints both."""
