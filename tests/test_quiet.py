"""TensorFlow's start says nothing; everything else that is written meanwhile is kept."""

from __future__ import annotations

from tests.conftest import RunPython


def test_the_start_is_silent_and_tensorflow_works(run_python: RunPython) -> None:
    code = """
from deeprec_spark.quiet import import_tensorflow
import_tensorflow()
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)  # would fail if the start had initialised the context
print(int(tf.constant(1) + 1))
import_tensorflow()
"""
    done = run_python(code)
    assert done.stdout == "2\n"
    assert done.stderr == ""


def test_what_others_write_is_kept_also_when_the_import_fails(run_python: RunPython) -> None:
    code = """
import os, sys
from pathlib import Path
Path("tensorflow.py").write_text(
    "import os; os.write(2, b'I0000 port.cc:153] chatter\\\\nsomething else\\\\n'); raise ImportError('broken')"
)
sys.path.insert(0, os.getcwd())
from deeprec_spark.quiet import import_tensorflow
try:
    import_tensorflow()
except ImportError as error:
    print(error)
"""
    done = run_python(code)
    assert done.stdout == "broken\n"
    assert done.stderr == "something else\n"
