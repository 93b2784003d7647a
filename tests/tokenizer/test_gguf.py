"""The GGUF reader: equal to the `gguf` package on whole files, one line of error on damaged ones."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelite.tokenizer.gguf import BLOCK, GGMLType, ModelFileError, read_gguf
from tests.tokenizer.small_gguf import HIDDEN, TOKENS, write_gguf


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "damaged.gguf"


def test_the_demo_model_is_read_as_the_gguf_package_reads_it(demo_model: Path) -> None:
    ours, theirs = read_gguf(demo_model), gguf.GGUFReader(demo_model)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.type == tensor.tensor_type
    for key, value in ours.metadata.items():
        if not isinstance(value, list):
            assert theirs.fields[key].contents() == value
    tokens = theirs.fields["tokenizer.ggml.tokens"]
    assert ours.metadata["tokenizer.ggml.tokens"][20000] == tokens.contents(20000)


def test_the_demo_models_metadata_is_read_fast(demo_model: Path) -> None:
    """49k tokens and merges in under 100 ms on a quiet machine; five times that fails."""
    took = []
    for _ in range(3):
        start = time.perf_counter()
        read_gguf(demo_model)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.5


def test_a_tensors_bytes_are_where_it_says(small: Path) -> None:
    file = read_gguf(small)
    tensor = file.tensors["token_embd.weight"]
    assert tensor.shape == (len(TOKENS), HIDDEN)
    values = np.frombuffer(file.data[tensor.offset : tensor.offset + tensor.nbytes], np.float32)
    assert values.tolist() == list(range(len(TOKENS) * HIDDEN))


def test_block_sizes_are_ggmls() -> None:
    known = {int(kind): size for kind, size in gguf.constants.GGML_QUANT_SIZES.items()}
    assert {int(kind): known[int(kind)] for kind in GGMLType} == {int(k): v for k, v in BLOCK.items()}


@given(data=st.data())
def test_a_truncated_file_is_one_line_of_error(small: Path, scratch: Path, data: st.DataObject) -> None:
    whole = small.read_bytes()
    scratch.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelFileError) as caught:
        read_gguf(scratch)
    assert str(scratch) in str(caught.value) and "\n" not in str(caught.value)


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    small: Path, scratch: Path, data: st.DataObject
) -> None:
    whole = bytearray(small.read_bytes())
    head = read_gguf(small).tensors["token_embd.weight"].offset
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, head - 1))
        width = data.draw(st.sampled_from([1, 4, 8]))
        whole[at : at + width] = data.draw(st.binary(min_size=width, max_size=width))
    scratch.write_bytes(whole)
    try:
        read_gguf(scratch)
    except ModelFileError as error:
        assert "\n" not in str(error)


def _header(tensors: int, pairs: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _string(name) + dims + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a GGUF file (0 bytes)"),
        (b"PK\x03\x04" + b"\0" * 40, "not a GGUF file (starts with"),
        (_header(0, 0, version=1), "GGUF version 1"),
        (_header(0, 0, version=0x03000000), "GGUF version 50331648"),
        (_header(0, 1 << 60), "metadata entry 0 of 1152921504606846976"),
        (_header(0, 1, struct.pack("<Q", 1 << 40) + b"k"), "metadata entry 0 of 1"),
        (_header(0, 1, _string("k") + struct.pack("<I", 99)), "metadata key 'k': unknown value type 99"),
        (_header(0, 1, _string("k") + struct.pack("<IIQ", 9, 4, 1 << 20)), "'k': an array of 1048576"),
        (_header(0, 1, _string("k") + struct.pack("<IIQ", 9, 0, 1 << 62)), "above the limit"),
        (_header(0, 1, _string("k") + struct.pack("<IIQ", 9, 77, 1)), "unknown array element type 77"),
        (_header(0, 1, _string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9), "nested"),
        (_header(0, 1, _string("k") + struct.pack("<IIQQ", 9, 8, 1, 50)), "string 0 of 1"),
        (_header(0, 1, _string("k") + struct.pack("<IQ", 8, 1) + b"\xff"), "a string is not UTF-8"),
        (_header(0, 2, (_string("k") + struct.pack("<IB", 0, 1)) * 2), "'k': given twice"),
        (_header(1, 0, _tensor("w", (4,), 77, 0)), "tensor 'w': unknown type 77"),
        (_header(1, 0, _tensor("w", (1,) * 9, 0, 0)), "tensor 'w': 9 dimensions"),
        (_header(1, 0, _tensor("w", (33,), 3, 0)), "no multiple of Q4_1's block of 32"),
        (_header(1, 0, _tensor("w", (1 << 60, 1 << 60), 0, 0)), "tensor 'w': ends at byte"),
        (_header(1, 0, _tensor("w", (1 << 40, 0), 0, 0)), "tensor 'w': a dimension of 0"),
        (_header(1, 0, _tensor("w", (1,), 0, 7)), "offset 7 is not aligned to 32"),
        (
            _header(0, 1, _string("general.alignment") + struct.pack("<II", 4, 0)),
            "'general.alignment': 0 is no positive multiple of 8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_error_names_the_place(scratch: Path, content: bytes, says: str) -> None:
    scratch.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        read_gguf(scratch)
    assert says in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nothing\.gguf: cannot be opened \(No such file"):
        read_gguf(tmp_path / "nothing.gguf")


def test_a_large_vocabulary_is_read_in_half_a_second(tmp_path: Path) -> None:
    """262,144 tokens, as Gemma 3 has; the limit is twice the target, for busy machines."""
    words = b"".join(_string(f"token{i}") for i in range(262_144))
    body = _string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 262_144) + words
    path = tmp_path / "large.gguf"
    path.write_bytes(_header(0, 1, body))
    took = []
    for _ in range(3):
        start = time.perf_counter()
        assert len(read_gguf(path).metadata["tokenizer.ggml.tokens"]) == 262_144
        took.append(time.perf_counter() - start)
    assert min(took) < 1.0
