"""The MLflow side: runs <-> records. MLflow is the only store."""
