from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nnx_probes import writers
from nnx_probes.errors import ArgumentTypeError, WriterError
from nnx_probes.writers import ConsoleWriter, JsonlWriter, MemoryWriter, TensorBoardWriter, open_destination
from nnx_probes.writers.jsonl import JsonlWriter as JsonlClass
from nnx_probes.writers.tensorboard import TensorBoardWriter as TensorBoardClass


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_is_event_files_jsonl_and_the_console(tmp_path, kind):
    made = open_destination(kind(tmp_path))
    assert [type(writer) for writer in made] == [JsonlWriter, TensorBoardWriter, ConsoleWriter]
    for writer in made:
        writer.close()


def test_a_writer_a_list_and_nothing():
    a, b = MemoryWriter(), MemoryWriter()
    assert open_destination(a) == [a]
    assert open_destination([a, (b, None)]) == [a, b]
    assert open_destination(None) == []


def test_an_object_that_lacks_methods_is_told_which():
    class Half:
        def write_scalars(self, step, scalars): ...
        def write_texts(self, step, texts): ...
        def write_images(self, step, images): ...
        def write_videos(self, step, videos): ...
        def write_audios(self, step, audios, *, sample_rate): ...
        def write_summaries(self, step, values, metadata=None): ...
        def write_hparams(self, hparams): ...
        def flush(self): ...

    with pytest.raises(ArgumentTypeError, match=r"got Half .*which lacks write_histograms, close\. Expected"):
        open_destination(Half())


@pytest.mark.parametrize("value", [3, {"a": 1}, object(), b"runs"])
def test_anything_else_is_told_what_fits(value):
    with pytest.raises(ArgumentTypeError, match=f"got {type(value).__name__} .*expected a folder"):
        open_destination(value)


def test_a_class_instead_of_an_instance_is_told_to_call_it():
    with pytest.raises(ArgumentTypeError, match=r"got MemoryWriter, expected an instance.*MemoryWriter\(\.\.\.\)"):
        open_destination([MemoryWriter])


def test_what_was_opened_before_an_error_is_closed(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(JsonlClass, "close", lambda self: closed.append(self))

    def fail(self, folder):
        raise WriterError("no")

    monkeypatch.setattr(TensorBoardClass, "__init__", fail)
    with pytest.raises(WriterError):
        open_destination(tmp_path)
    assert len(closed) == 1


def test_an_unknown_name_suggests_the_closest():
    with pytest.raises(AttributeError, match="Did you mean 'JsonlWriter'"):
        writers.JsonWriter  # noqa: B018
    assert set(writers.__all__) <= set(dir(writers))


def test_importing_the_package_imports_no_viewer_and_no_framework():
    program = (
        "import sys, nnx_probes.writers\n"
        "heavy = {'tensorboard', 'tensorboardX', 'rich', 'numpy', 'jax', 'tensorflow', 'torch', 'google.protobuf'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_writing_tries_to_import_neither_jax_nor_tensorflow_nor_torch(tmp_path):
    # Tries: a `try: import torch` costs seconds where torch is there, and shows nowhere else.
    program = (
        "import sys, numpy as np\n"
        "tried = set()\n"
        "class Listener:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        tried.add(name.partition('.')[0])\n"
        "sys.meta_path.insert(0, Listener())\n"
        "from nnx_probes.writers import Fanout, read_jsonl\n"
        "from nnx_probes.host.alert import Alert, Level\n"
        "fanout = Fanout.open(sys.argv[1])\n"
        "fanout.writers[0].write_hparams({'a': 1})\n"
        "fanout.writers[0].write_images(1, {'i': np.zeros((2, 2, 3))})\n"
        "fanout.alert(Alert(1, 'r', Level.ERROR, 't'))\n"
        "fanout.close()\n"
        "list(read_jsonl(sys.argv[1]))\n"
        "assert 'tensorboard' in tried\n"
        "print(sorted({'jax', 'tensorflow', 'torch'} & tried))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
