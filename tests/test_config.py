"""Settings: flags, environment, bounds, and what is made from the one declaration."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from servelite.config import (
    SettingError,
    Settings,
    add_flags,
    flag_of,
    flag_table,
    settings_from,
    unknown_variables,
    variable_of,
)


def parse(*words: str) -> dict:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(words))


def test_flags_win_over_the_environment_and_that_over_defaults() -> None:
    environ = {"SERVELITE_PORT": "9000", "SERVELITE_MAX_NUM_SEQS": "7", "SERVELITE_DEBUG": "true"}
    settings = settings_from(parse("--port", "9001"), environ)
    assert (settings.port, settings.max_num_seqs, settings.debug) == (9001, 7, True)
    assert settings.host == "127.0.0.1"
    assert settings_from(parse("--no-debug"), environ).debug is False


def test_names_are_several() -> None:
    assert settings_from(parse("--served-model-name", "a", "b"), {}).served_model_name == ("a", "b")
    assert settings_from({}, {"SERVELITE_SERVED_MODEL_NAME": "a,b"}).served_model_name == ("a", "b")
    again = parse("--api-key", "a", "--port", "9001", "--api-key", "b", "c")
    assert settings_from(again, {"SERVELITE_API_KEY": "d"}).api_key == ("a", "b", "c")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 65536}, ["--port", "65536", "65535"]),
        ({"port": -1}, ["--port", "-1", "0"]),
        ({"executor": "magic"}, ["--executor", "magic", "simulated"]),
        ({"max_num_seqs": 600}, ["--max-num-batched-tokens", "512", "600"]),
        ({"simulated_step_ms": 5.0}, ["--simulated-step-ms", "--executor simulated"]),
        ({"async_depth": 9}, ["--async-depth", "9", "8"]),
        ({"dtype": "float16"}, ["--dtype", "float16", "bfloat16"]),
        ({"device": "cuda"}, ["--device", "cuda", "cpu"]),
        ({"unknown_fields": "maybe"}, ["--unknown-fields", "maybe", "warn"]),
        ({"api_key": ("",)}, ["--api-key", "empty"]),
        ({"max_logprobs": 1025}, ["--max-logprobs", "1025", "1024"]),
        ({"timeout_keep_alive": 0}, ["--timeout-keep-alive", "0", "1"]),
        *(
            ({"executor": "simulated", name: float(value)}, [flag_of(name), value, "finite"])
            for name in ("drain_timeout", "drain_delay", "sse_keep_alive", "simulated_step_ms")
            for value in ("nan", "inf", "-inf")
        ),
        ({"executor": "simulated", "simulated_step_ms": -1.0}, ["--simulated-step-ms", "-1.0", "0.0"]),
        ({"host": ""}, ["--host", "empty"]),
        ({"max_model_len": 1}, ["--max-model-len", "1", "2"]),
        ({"gpu_memory_utilization": 1.1}, ["--gpu-memory-utilization", "1.1", "1.0"]),
        (
            {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1},
            ["--gpu-memory-utilization", "--kv-cache-memory-bytes"],
        ),
        ({"model": ""}, ["MODEL", "empty"]),
        ({"served_model_name": ("a", "")}, ["--served-model-name", "empty"]),
    ],
)
def test_a_value_out_of_bounds_names_flag_value_and_limit(values: dict, words: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        Settings(**values)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(("variable", "value"), [("SERVELITE_PORT", "x"), ("SERVELITE_DEBUG", "maybe")])
def test_a_bad_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(SettingError, match=variable):
        settings_from({}, {variable: value})


def test_a_number_that_is_none_is_called_that(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("port", "not an integer"), ("drain_timeout", "not a number")):
        with pytest.raises(SettingError, match=words):
            settings_from({}, {variable_of(name): "x"})
        with pytest.raises(SystemExit):
            parse(flag_of(name), "x")
        assert words in capsys.readouterr().err


def test_a_variable_that_is_no_setting_is_found() -> None:
    names = ["SERVELITE_PORT", "SERVELITE_CACHE", "SERVELITE_TEST_ALL", "SERVELITE_PRT", "PATH"]
    assert unknown_variables(dict.fromkeys(names, "1")) == ["SERVELITE_PRT"]


def test_settings_cross_a_message() -> None:
    import msgspec

    settings = Settings(served_model_name=("a",), port=0, debug=True)
    assert Settings.from_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(settings.to_dict()))) == settings


def test_every_setting_has_a_flag_a_variable_a_text_and_a_row() -> None:
    table = flag_table()
    for f in dataclasses.fields(Settings):
        assert f.metadata["text"]
        assert variable_of(f.name).startswith("SERVELITE_")
        assert (f"`{flag_of(f.name)}`" if f.name != "model" else "`MODEL`") in table
