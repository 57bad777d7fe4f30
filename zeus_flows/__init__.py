"""zeus_flows: energy-optimal recurring GPU training as Prefect flows over MLflow."""
