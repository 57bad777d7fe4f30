"""The loop side: the session a train function receives."""
