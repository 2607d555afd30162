"""DAGs for Airflow; each file stands alone and needs nothing of this package where Airflow runs."""
