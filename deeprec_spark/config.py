"""The job's YAML: data, features, model, training, cluster, evaluation, export; each wrong key is named by its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    field_serializer,
    model_validator,
)

from deeprec_spark.config_optimizers import (
    OptimizerSection,
    optimizer_problems,
    sparse_optimizer_problems,
    sparse_optimizers,
)
from deeprec_spark.config_sections import (
    DeadlinesSection,
    DenseStepSection,
    FeaturesSection,
    PipelineSection,
    Section,
    TlsSection,
    TracingSection,
    unknown_key,
)
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.quiet import import_tensorflow
from deeprec_spark.redaction import MASK, is_secret, redact_settings, redacted

if TYPE_CHECKING:
    from deeprec_spark.recovery import RestartOptions
    from deeprec_spark.runtime.semi_sync import SemiSyncOptions
    from deeprec_spark.saving import CheckpointOptions

PositiveInt = Annotated[int, Field(ge=1)]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names file, key, what is wrong and what to do."""


class DataSection(Section):
    """Where raw rows come from, and where the prepared ones go.

    `prepared` gets `train/` and `test/` (Parquet) and `feature_spec.json`. Relative paths are relative to the
    working directory; a path with a scheme (`hdfs://`, `s3a://`) goes to Spark as it is.
    """

    kind: Literal["synthetic", "criteo", "movielens"] = Field(description="What the raw rows are.")
    path: str | None = Field(None, description="Criteo TSV/CSV file or folder, or MovieLens folder.")
    prepared: str = Field(description="Folder of prepared Parquet and the feature spec.")
    rows: PositiveInt = Field(200_000, description="Rows to generate (kind: synthetic).")
    seed: int = Field(1, description="Seed of the generator (kind: synthetic).")
    test_fraction: float = Field(0.2, gt=0.0, lt=1.0, description="Part of the rows held out for evaluation.")
    split: Literal["hash", "time"] = Field(
        "hash", description="MovieLens: test rows by hash, or the last in time."
    )
    max_malformed: float = Field(
        0.01, ge=0.0, le=1.0, description="A larger part of malformed rows is an error."
    )

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if self.kind == "synthetic" and self.path is not None:
            raise ValueError("kind 'synthetic' generates its rows: remove path, or say kind: criteo")
        if self.kind != "synthetic" and self.path is None:
            raise ValueError(f"kind {self.kind!r} reads files: add path")
        return self


class ModelSection(Section):
    """A model of deeprec_spark.models by name, with its options."""

    name: str = Field("deepfm", description="wdl, deepfm, dlrm, dssm, din or mmoe.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="The model's options, such as embedding_dim."
    )


class EarlyStoppingSection(Section):
    """Stop when `monitor` has not improved for `patience` epochs, and go back to the best one."""

    monitor: str = Field("val_auc", description="A metric of fit, such as val_auc or val_loss.")
    mode: Literal["auto", "min", "max"] = Field("max", description="Which way is better.")
    patience: int = Field(1, ge=0, description="Epochs without improvement.")


class CheckpointsSection(Section):
    """When training is saved, beside its end. `null` switches a rule off. Training goes on while files are written."""

    save_secs: float | None = Field(1800.0, gt=0.0, description="A full checkpoint after so many seconds.")
    save_steps: int | None = Field(None, ge=1, description="Or after so many updates of the model.")
    incremental_secs: float | None = Field(
        None, gt=0.0, description="What changed since the last save, after so many seconds."
    )
    incremental_steps: int | None = Field(None, ge=1, description="Or after so many updates.")
    keep_max: PositiveInt = Field(
        2, description="Full checkpoints that stay, each with the incremental ones that build on it."
    )
    on_sigterm: bool = Field(True, description="Save when the driver gets SIGTERM, then end.")
    fallback: bool = Field(
        False,
        description="Begin with the last whole checkpoint where the newest is damaged; else it is an error.",
    )
    changed_options: bool = Field(
        False,
        description="Go on though the filter or eviction of a table has changed since; else it is an error.",
    )
    resume: bool = Field(
        True, description="Go on in the middle of a run of the same data and settings that was cut short."
    )

    def make_options(self) -> CheckpointOptions:
        """The section as the Estimator takes it."""
        from deeprec_spark.saving import CheckpointOptions

        return CheckpointOptions(**self.model_dump())


class WarmStartSection(Section):
    """What a new model takes over from another checkpoint; once `model_dir` has one, that counts."""

    path: str = Field(description="The checkpoint, or a model directory, whose newest one is taken.")
    values_only: bool = Field(
        False, description="No optimizer state and frequencies: optimizer, value type and options may differ."
    )
    tables: list[str] | None = Field(
        None, description="Tables of the model to fill, the others start empty; null is all."
    )
    rename: dict[str, str] = Field({}, description="The checkpoint's name of a table to the model's.")
    new_tables: bool = Field(False, description="Let tables that the checkpoint lacks start empty.")
    dense: bool = Field(True, description="Take the dense weights too.")
    dense_only: bool = Field(False, description="Take the dense weights and no table.")

    def make_options(self) -> WarmStart:
        """The section as the Estimator takes it."""
        return WarmStart.from_dict(self.model_dump())


class RestartsSection(Section):
    """What happens when a node fails that training cannot do without: all are started again."""

    max_restarts: int = Field(
        3,
        ge=0,
        description="How often from one checkpoint, before training fails; a save begins the count anew.",
    )
    backoff_secs: float = Field(2.0, ge=0.0, description="Pause before the first restart; doubled each time.")
    max_backoff_secs: float = Field(60.0, ge=0.0, description="The longest pause.")
    slots_secs: float = Field(
        180.0, ge=0.0, description="How long a restart waits for Spark to replace lost executors."
    )

    def make_options(self) -> RestartOptions:
        """The section as the Estimator takes it."""
        from deeprec_spark.recovery import RestartOptions

        return RestartOptions(**self.model_dump())


class TrainingSection(Section):
    """What `fit` is told."""

    model_dir: str = Field(
        description="Where checkpoints go, a path or URI; a second run goes on from the last."
    )
    epochs: PositiveInt = Field(1, description="Passes over the training rows.")
    batch_size: PositiveInt = Field(
        2048, description="Rows of a step: of each worker (async), of all together (sync)."
    )
    optimizer: OptimizerSection = Field(
        OptimizerSection(name="adam", learning_rate=0.001), description="Of the dense parameters; Keras's."
    )
    sparse_optimizer: OptimizerSection = Field(
        OptimizerSection(name="adagrad", learning_rate=0.05),
        description="Of the embedding rows; the engine's.",
    )
    validate_each_epoch: bool = Field(False, description="Evaluate the held-out rows after each epoch.")
    early_stopping: EarlyStoppingSection | None = Field(None, description="Stop before the last epoch.")
    class_weight: dict[int, float] | None = Field(
        None, description="Weight of the loss by label, as {0: 1.0, 1: 3.0}."
    )
    seed: int = Field(0, description="Initial weights, table rows, order of the rows.")
    shuffle_rows: int = Field(
        0, ge=0, description="Rows of several row groups that are shuffled together; 0: those of a lease."
    )
    cache_dir: str | None = Field(
        None, description="Folder on each host for copies of remote data files; null: read them remotely."
    )
    cache_mb: PositiveInt = Field(10_240, description="Room for the copies of a host.")
    dense_step: DenseStepSection = DenseStepSection()
    warm_start: WarmStartSection | None = Field(None, description="Begin with weights of another checkpoint.")
    checkpoints: CheckpointsSection = CheckpointsSection()
    restarts: RestartsSection = RestartsSection()
    tensorboard: str | None = Field(None, description="Folder of TensorBoard logs.")
    pipeline: PipelineSection | None = Field(
        None,
        description="How far stages run ahead of the step that computes.",
    )
    tracing: TracingSection | None = Field(
        None, description="Write what a run tells of itself: TensorBoard scalars, a Chrome trace, a page."
    )

    def make_sparse_optimizer(self) -> Optimizer:
        """The optimizer of the embedding rows, as the engine takes it."""
        known = sparse_optimizers()
        kind = known.get(self.sparse_optimizer.name.lower())
        if kind is None:
            raise ValueError(
                f"Unknown sparse_optimizer; known are {', '.join(sorted(known))}. "
                f"Received: name={self.sparse_optimizer.name!r}"
            )
        return kind.from_dict({"type": kind.__name__, **self.sparse_optimizer.arguments})

    @model_validator(mode="after")
    def _check(self) -> TrainingSection:
        stopping = self.early_stopping
        if stopping is not None and stopping.monitor.startswith("val_") and not self.validate_each_epoch:
            raise ValueError(
                f"early_stopping watches {stopping.monitor!r}, which needs validate_each_epoch: true"
            )
        return self


class SemiSyncSection(Section):
    """Bounds what a slow worker costs: max_staleness with mode: async, or backup_workers with mode: sync."""

    max_staleness: int | None = Field(
        None, ge=0, description="Steps that a worker may be ahead of the slowest one (async)."
    )
    backup_workers: int = Field(
        0, ge=0, description="Workers that a step does not wait for; what they push late is dropped (sync)."
    )
    patience_secs: float = Field(
        60.0, gt=0.0, description="A worker that pushes nothing for so long holds no one up (max_staleness)."
    )

    def make_options(self) -> SemiSyncOptions:
        """The section as the Estimator takes it."""
        from deeprec_spark.runtime.semi_sync import SemiSyncOptions

        return SemiSyncOptions(**self.model_dump())


class ClusterSection(Section):
    """Where it runs. `conf` are Spark properties; those of spark-submit and of a running session win."""

    num_ps: int = Field(0, ge=0, description="Parameter servers; 0 keeps the tables inside the workers.")
    workers: PositiveInt = Field(
        1, description="Workers in all; one task slot each, as for parameter servers."
    )
    mode: Literal["async", "sync"] = Field(
        "async", description="Apply each worker's step at once, or sum all of them."
    )
    placement: Literal["separate", "colocated"] = Field(
        "separate",
        description="Parameter servers beside the workers, or (num_ps: 0) a shard of the tables in each worker.",
    )
    semi_sync: SemiSyncSection | None = Field(None, description="Something between async and sync.")
    executor_policy: Literal["default", "pinned", "inline"] = Field(
        "default",
        description="Threads and CPUs of a node: by its executor's cores, CPUs of its own, or operations one by one.",
    )
    tls: TlsSection | None = Field(None, description="Certificates; without them calls are not encrypted.")
    max_message_mb: int = Field(
        1024, ge=1, le=2047, description="Larger messages are refused: a step's rows, a worker's result."
    )
    wire_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="What rows and gradients are between workers and servers."
    )
    deadlines: DeadlinesSection = DeadlinesSection()
    conf: dict[str, str] = Field(default_factory=dict, description="Spark properties.")

    @field_serializer("conf")
    def _without_secrets(self, conf: dict[str, str]) -> dict[str, str]:
        return redacted(conf)

    @model_validator(mode="after")
    def _check(self) -> ClusterSection:
        if self.placement == "colocated" and self.num_ps != 0:
            raise ValueError(
                f"placement: colocated keeps the tables inside the workers: set num_ps: 0. "
                f"Received: num_ps={self.num_ps}"
            )
        if self.placement == "separate" and self.num_ps == 0 and self.workers != 1:
            raise ValueError(
                f"num_ps: 0 hosts the tables inside one worker: set workers: 1, num_ps: 1 or more, or placement: "
                f"colocated. Received: workers={self.workers}"
            )
        if self.semi_sync is not None:
            self.semi_sync.make_options().check(self.mode, self.workers)
        return self


class EvaluationSection(Section):
    """How the held-out rows are judged."""

    batch_size: PositiveInt = Field(8192, description="Rows that a task evaluates at once.")
    min_auc: float | None = Field(None, ge=0.0, le=1.0, description="`evaluate` fails below this AUC.")


class PredictionSection(Section):
    """What `predict` scores."""

    input: str | None = Field(
        None, description="Parquet with the model's columns; default: the prepared test rows."
    )
    output: str | None = Field(None, description="Parquet folder; default: `predictions` beside them.")
    batch_size: PositiveInt = Field(8192, description="Rows that a task scores at once.")


class ExportSection(Section):
    """Where the deployable model goes."""

    path: str = Field(description="Folder of the SavedModel; replaced when it is there.")


class JobConfig(Section):
    """One job, as `conf/*.yaml` writes it.

    Example:
        >>> config = load_config("conf/movielens.yaml", overrides=["training.epochs=2"])
        >>> config.training.epochs
        2
    """

    name: str = Field("deeprec-spark", description="Name of the Spark application.")
    data: DataSection
    features: FeaturesSection = FeaturesSection()
    model: ModelSection = Field(default_factory=ModelSection)
    training: TrainingSection
    cluster: ClusterSection = ClusterSection()
    evaluation: EvaluationSection = EvaluationSection()
    prediction: PredictionSection = PredictionSection()
    export: ExportSection


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read and check a job's YAML.

    Args:
        path: The YAML file.
        overrides: `section.key=value` texts that replace what the file says; the value is read as YAML.

    Raises:
        ConfigError: The file is unreadable, is no YAML, or has wrong keys or values; every one is listed. The
            options of the model and of the dense optimizer are looked at when all else is right.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"Cannot read the configuration: {error.strerror}. Received: path={str(path)!r}"
        ) from error
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        # Not chained: its own text quotes the file's lines, secrets included.
        raise ConfigError(f"{path} is not YAML: {redact_settings(str(error))}") from None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} must hold sections such as 'data:' and 'training:'. Received: {raw!r}")
    return parse_config(raw, overrides, source=str(path))


def parse_config(
    raw: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "config"
) -> JobConfig:
    """The same from values that are already read; `source` is what errors call them."""
    values = _deep_copy(raw)
    for override in overrides:
        _apply(values, override)
    try:
        config = JobConfig.model_validate(values)
    except ValidationError as error:
        # Not chained: its own text quotes every value.
        raise _config_error(source, [_explain(problem) for problem in error.errors()]) from None
    problems = sparse_optimizer_problems(config.training.sparse_optimizer)
    if not problems:
        # Last: it brings Keras, which takes seconds that an answer to any other mistake need not wait.
        import_tensorflow()
        problems = [*_model_problems(config.model), *optimizer_problems(config.training.optimizer)]
    if problems:
        raise _config_error(source, problems)
    return config


def _config_error(source: str, lines: Sequence[str]) -> ConfigError:
    return ConfigError(f"{source}: {len(lines)} problem(s)\n" + "\n".join(f"  {line}" for line in lines))


def _model_problems(section: ModelSection) -> list[str]:
    """What is wrong with the model's name or its options, one line each."""
    from deeprec_spark.models import registry

    if section.name not in registry.names():
        known = ", ".join(registry.names())
        return [f"model.name: unknown model; known are {known}. Received: {section.name!r}"]
    try:
        registry.options_of(section.name, **section.options)
    except ValueError as error:
        if not isinstance(error.__cause__, ValidationError):
            return [f"model.options: {error}"]
        known_options = [field.name for field in dataclasses.fields(registry.options_of(section.name))]
        return [
            _explain({**problem, "loc": ("model", "options", *problem["loc"])}, known_options)
            for problem in error.__cause__.errors()
        ]
    return []


def _deep_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _deep_copy(item) for key, item in value.items()}
    return value


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"An override reads section.key=value. Received: {override!r}")
    place = values
    for part in parts[:-1]:
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise ConfigError(f"{part!r} is a value, not a section, in override {override!r}")
    try:
        place[parts[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        text = redact_settings(f"The value of override {override!r} is not YAML: {error}")
        raise ConfigError(text) from None


def _explain(problem: Any, known: Sequence[str] | None = None) -> str:
    """One line for one wrong key: its path, what is wrong, and the nearest right key (of `known`, or the section's)."""
    location = [str(part) for part in problem["loc"]]
    if any(is_secret(part) for part in location):
        problem = {**problem, "input": MASK}
    path = ".".join(location) or "(top level)"
    kind = problem["type"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        names = _known_keys(location[:-1]) if known is None else known
        return unknown_key(path, location[-1], problem["input"], names)
    if kind == "missing":
        return f"{path}: is needed and missing"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if "Received:" in message or isinstance(problem["input"], Mapping):
        return f"{path}: {message}"
    return f"{path}: {message}. Received: {problem['input']!r}"


def _known_keys(section: Sequence[str]) -> list[str]:
    """The keys of the section at this path."""
    model: type[BaseModel] = JobConfig
    for name in section:
        annotation = model.model_fields[name].annotation if name in model.model_fields else None
        inner = [
            part for part in (annotation, *getattr(annotation, "__args__", ())) if isinstance(part, type)
        ]
        sections = [part for part in inner if issubclass(part, BaseModel)]
        if not sections:
            return []
        model = sections[0]
    return list(model.model_fields)
