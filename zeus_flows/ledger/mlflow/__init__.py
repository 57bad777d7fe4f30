"""The ledger in MLflow tracking runs; `docs/reference/mlflow-schema.md` is its contract."""
