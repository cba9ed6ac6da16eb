"""Example tracker: log metrics to MLflow, at MLFLOW_TRACKING_URI or in a file of the run."""

import os

from mlflow import MlflowClient
from mlflow.entities import Metric

from mindspeed_rlxf.reporting.trackers import register_tracker


@register_tracker("mlflow", module="mlflow", package="mlflow-skinny sqlalchemy alembic")
class MlflowTracker:
    """Logs all starts of a run directory to one MLflow run, identified by a tag."""

    def __init__(self, run):
        home = f"sqlite:///{run.folder}/mlflow.db"
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", home))
        found = self.client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self.client.create_experiment(run.project)
        query = f"tags.rlxf_run = '{run.run_id}'"
        known = self.client.search_runs([experiment], query, max_results=1)
        tags = {"rlxf_run": run.run_id, "mlflow.runName": run.name}
        self.run_id = (
            known[0] if known else self.client.create_run(experiment, tags=tags)
        ).info.run_id

    def log(self, iteration, metrics):
        rows = [Metric(name.replace("@", "_at_"), v, 0, iteration) for name, v in metrics.items()]
        self.client.log_batch(self.run_id, metrics=rows)

    def finish(self):
        self.client.set_terminated(self.run_id)
