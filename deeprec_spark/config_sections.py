"""What the sections of a job's configuration have in common, and those that stand by themselves."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, field_serializer

from deeprec_spark.redaction import redact

if TYPE_CHECKING:
    from deeprec_spark.runtime.options import DeadlineOptions
    from deeprec_spark.runtime.transport import TlsOptions
    from deeprec_spark.tracing import TracingOptions
    from deeprec_spark.training.options import DenseStepOptions
    from deeprec_spark.training.pipeline import PipelineOptions


class Section(BaseModel):
    """A part of the configuration: no unknown keys, no changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_serializer("*", when_used="unless-none", mode="wrap")
    def _without_passwords(self, value: Any, serialize: SerializerFunctionWrapHandler) -> Any:
        """URIs may hold keys and passwords."""
        return redact(value) if isinstance(value, str) else serialize(value)


class TlsSection(Section):
    """Encrypts the calls between driver and nodes. Files (PEM) must lie under these paths on every host."""

    certificate: str = Field(description="Certificate of driver and nodes, with its chain.")
    private_key: str = Field(description="Its key; only the user of the job should be able to read it.")
    ca_certificate: str | None = Field(None, description="Whom to trust; default: the system's authorities.")
    override_hostname: str | None = Field(None, description="A name in a certificate that names no hosts.")
    verify_client: bool = Field(False, description="Clients must show a certificate of this authority too.")

    def make_options(self) -> TlsOptions:
        """The options as the runtime takes them."""
        from deeprec_spark.runtime.transport import TlsOptions  # here: `--help` need not load Arrow Flight

        return TlsOptions(**self.model_dump())


class TracingSection(Section):
    """What a training run writes beside its log. `tracing: {}` switches it on as it is here."""

    log_dir: str | None = Field(None, description="Folder, a path or URI; default: `tracing` in model_dir.")
    tensorboard: bool = Field(True, description="Scalars of each worker and server, as TensorBoard logs.")
    trace_steps: int = Field(
        200, ge=0, description="Last steps of each worker that `trace.json` shows; 0: no trace."
    )
    sample_every: int = Field(1, ge=1, description="Of how many steps the trace shows one.")
    interval_secs: float = Field(10.0, gt=0.0, description="How often nodes are asked.")

    def make_options(self) -> TracingOptions:
        """The section as the Estimator takes it."""
        from deeprec_spark.tracing import TracingOptions

        return TracingOptions(**self.model_dump())


class DeadlinesSection(Section):
    """After what time something that does not answer is taken for lost. Seconds."""

    registration_secs: float = Field(
        300.0, gt=0.0, description="From the start until all nodes are registered."
    )
    heartbeat_secs: float = Field(30.0, gt=0.0, description="A node that is silent for so long is lost.")
    rejoin_secs: float = Field(
        120.0, gt=0.0, description="How long async training waits for a lost worker's return."
    )
    stall_secs: float = Field(
        3600.0, gt=0.0, description="How long a worker that is alive may make no progress."
    )
    step_secs: float = Field(
        900.0, gt=0.0, description="How long the workers of a synchronous step wait for the slowest of them."
    )
    file_secs: float = Field(
        21600.0, gt=0.0, description="How long a node may write or read its part of a checkpoint."
    )

    def make_options(self) -> DeadlineOptions:
        """The Estimator's options."""
        from deeprec_spark.runtime.options import DeadlineOptions

        return DeadlineOptions(**self.model_dump())


class FeaturesSection(Section):
    """How raw columns become features."""

    history_length: int = Field(
        0, ge=0, description="MovieLens: last items of the user as a sequence; 0: none."
    )
    group_by: list[str] | None = Field(
        None, description="Columns whose equal values make a group of samples, as [user]; null: flat data."
    )
    group_features: list[str] | None = Field(
        None,
        description="Features stored and looked up once for a group; null: the user's, without MovieLens' history.",
    )


class PipelineSection(Section):
    """How far the stages of later steps run ahead of the one that computes."""

    depth: int = Field(2, ge=0, description="Batches that are read and prepared ahead; 0: none.")
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Pushes of its own that a worker's pull may run ahead of; null: 1 with async servers, else 0.",
    )
    parallel_steps: int = Field(
        2, ge=1, description="Steps that compute at the same time: at most max_staleness + 1 can."
    )
    warmup_updates: int | None = Field(
        None,
        ge=0,
        description="Updates before which no pull runs ahead; null: 500, or 0 where max_staleness is given.",
    )

    def make_options(self) -> PipelineOptions:
        """The section as the Estimator takes it."""
        from deeprec_spark.training.pipeline import PipelineOptions

        return PipelineOptions(**self.model_dump())


class DenseStepSection(Section):
    """How TensorFlow computes the dense part of a step."""

    xla: bool = Field(False, description="Compile it with XLA, for batches of shapes that come again.")
    micro_batch: int | None = Field(
        None, ge=1, description="Compute a batch in parts of at most so many samples; null: in one."
    )

    def make_options(self) -> DenseStepOptions:
        """The section as the Estimator takes it."""
        from deeprec_spark.training.options import DenseStepOptions

        return DenseStepOptions(**self.model_dump())


def unknown_key(path: str, key: str, value: object, known: Sequence[str]) -> str:
    """One line that names a key which there is not, and the nearest of the known ones."""
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{path}: unknown key; {hint}Known: {', '.join(known)}. Received: {value!r}"
