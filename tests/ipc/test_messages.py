"""The message structs: round trips, refusal of what is no message, and the room they keep."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from servelite.ipc import messages as m
from servelite.ipc.sockets import decode_from_engine, decode_to_engine, encode

ADD = m.Add(
    request=7,
    prompt=m.pack([1, 2, 3]),
    sampling=m.SamplingParams(max_tokens=4, temperature=0.5, stop_token_ids=(2,), logit_bias=((5, -1.0),)),
    seed=2**64 - 1,
    produced=m.pack([9]),
    attempt=2,
    deadline_ms=100,
)
OUTPUTS = m.Outputs(
    engine=0,
    epoch=3,
    step=9,
    load=m.Load(running=1, free_blocks=5),
    requests=m.pack([7], m.NUMBER),
    first_index=m.pack([1]),
    counts=m.pack([1]),
    finish=m.pack([m.FinishReason.ERROR], m.FLAG),
    tokens=m.pack([11]),
    errors={7: m.RequestError(400, "x", "y")},
    timings={7: m.Timings(0.1, 0.2, 0.3)},
    logprobs={7: m.TokenLogprobs(0, 1, b"", b"", b"")},
)


@pytest.mark.parametrize("message", [ADD, m.Abort(m.pack([1, 2], m.NUMBER)), m.Hello(3, 1)])
def test_to_the_engine(message: m.ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize(
    "message", [OUTPUTS, m.Ready(0, 1, 1, 10, 16, 100, 8, 64, 1000, "float32", "cpu", "auto")]
)
def test_from_the_engine(message: m.FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


@pytest.mark.parametrize(
    "frame", [b"", b"\x00", b"junk", encode(OUTPUTS), encode(ADD)[:-3], b"\x93\x01\x02\x03"]
)
def test_what_is_no_message_to_the_engine_is_a_decode_error(frame: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        decode_to_engine(frame)


@pytest.mark.parametrize("dtype", [m.TOKEN, m.NUMBER, m.FLAG])
def test_columns_round_trip(dtype: np.dtype) -> None:
    info = np.iinfo(dtype)
    values = [0, 1, -1, info.min, info.max]
    assert m.unpack(m.pack(values, dtype), dtype).tolist() == values
    assert m.unpack(m.pack([], dtype), dtype).tolist() == []


def test_a_later_field_has_a_default_so_an_older_sender_is_understood() -> None:
    short = msgspec.msgpack.encode([1, 7, m.pack([1]), [4], 5])
    add = decode_to_engine(short)
    assert isinstance(add, m.Add) and add.sampling.max_tokens == 4 and add.media == ()
    for struct in (m.Add, m.Outputs, m.Plan, m.StepResult, m.Ready, m.SamplingParams, m.Load, m.Timings):
        fields = msgspec.structs.fields(struct)
        required = [f.required for f in fields]
        assert required == sorted(required, reverse=True), (
            f"{struct.__name__}: a required field after an optional one"
        )


def test_a_step_of_64_requests_is_one_small_message() -> None:
    numbers = np.arange(64)
    outputs = m.Outputs(
        0, 1, 5, m.Load(),
        requests=m.pack(numbers, m.NUMBER), first_index=m.pack(numbers), counts=m.pack(np.ones(64)),
        finish=m.pack(np.zeros(64), m.FLAG), tokens=m.pack(numbers),
    )  # fmt: skip
    assert len(encode(outputs)) < 1500
