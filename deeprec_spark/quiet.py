"""Import TensorFlow without the lines about absent GPUs that it writes before any log level holds."""

from __future__ import annotations

import os
import re
import sys
import tempfile

# Written at import and at the first look for devices, whatever TF_CPP_MIN_LOG_LEVEL says; nothing follows from it.
_CHATTER = re.compile(
    rb"before absl::InitializeLog|port\.cc:|cudart_stub\.cc:|cuda_platform\.cc:|cpu_feature_guard\.cc:"
    rb"|To enable the following instructions"
)


def import_tensorflow() -> None:
    """Import TensorFlow and look for devices; what it writes to standard error meanwhile is shown without the chatter.

    Does nothing when TensorFlow is loaded already. Other threads' lines of that moment come a little later.
    """
    if "tensorflow" in sys.modules:
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            for line in caught:
                if not _CHATTER.search(line):
                    os.write(2, line)
