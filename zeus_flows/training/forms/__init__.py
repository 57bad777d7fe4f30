"""Forms that a training job may have beside a train function: each drives a session, and keeps no books of its own."""
