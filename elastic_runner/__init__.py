"""The launcher: command line, supervisor, worker processes, detection, policy, the record and its readers."""
