"""What the sections of a job's configuration have in common, and those that stand by themselves."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, field_serializer

from deeprec_spark.redaction import redact

if TYPE_CHECKING:
    from deeprec_spark.runtime.transport import TlsOptions


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


def unknown_key(path: str, key: str, value: object, known: Sequence[str]) -> str:
    """One line that names a key which there is not, and the nearest of the known ones."""
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{path}: unknown key; {hint}Known: {', '.join(known)}. Received: {value!r}"
