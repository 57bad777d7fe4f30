"""The larger sections of a job file, each checked for itself."""
