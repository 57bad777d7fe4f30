"""One recurrence, without Prefect: production and trace replay share its loop and its steps."""
