"""The schemas of pydantic's models: what is drawn under one is an instance of its model."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pytest
from pydantic import (
    UUID4,
    UUID7,
    Base64Bytes,
    Base64UrlStr,
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyAddress,
    IPvAnyInterface,
    RootModel,
    SecretStr,
)

from servelite.frontend.errors import APIError
from servelite.frontend.grammar_check import compile_check
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from tests.engine.test_grammars import load
from tests.frontend.test_grammars import text_by

T = TypeVar("T")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(Strict):
    x: int = Field(ge=-5, le=5)
    y: float = Field(gt=0, lt=1)


class Nested(Strict):
    """With a docstring, which is its description."""

    point: Point
    others: list[Point] = Field(max_length=2)
    colour: Colour = Colour.RED
    level: Level


class Usual(Strict):
    name: str = Field(min_length=1, max_length=3, title="Its name", examples=["a"])
    code: str | None = Field(None, pattern="^[A-Z]{2}$")
    kind: Literal["a", "b", 3, True]
    either: int | Annotated[str, Field(max_length=3)]
    sizes: dict[str, int] = Field(max_length=1)
    pair: tuple[int, bool]
    many: tuple[bool, ...] = ()
    anything: Any = None


class Times(Strict):
    at: datetime.datetime
    day: datetime.date
    time: datetime.time
    length: datetime.timedelta
    id: uuid.UUID
    address: ipaddress.IPv4Address
    email: str = Field(json_schema_extra={"format": "email"}, max_length=20)


class Formats(Strict):
    id: UUID4
    later: UUID7
    path: pathlib.Path
    data: bytes = Field(max_length=3)
    secret: SecretStr = Field(max_length=3)
    base64: Base64Bytes
    url_safe: Base64UrlStr = Field(max_length=0)
    address: IPvAnyAddress
    interface: IPvAnyInterface
    network: ipaddress.IPv6Interface


class Keys(Strict):
    colours: dict[Colour, Point]
    literal: dict[Literal["a", "b"], bool]
    one: dict[Literal["a"], bool]
    days: dict[datetime.date, bool] = Field(max_length=1)
    ids: dict[UUID4, int] = Field(max_length=1)
    paths: dict[pathlib.Path, bool] = Field(max_length=1)


class Money(Strict):
    """Of whose numbers the schema says less than the model asks for; as of a duration's."""

    plain: Decimal
    price: Decimal = Field(max_digits=6, decimal_places=2, ge=0)


class Cat(Strict):
    kind: Literal["cat"] = "cat"
    lives: int = Field(ge=1, le=9)


class Dog(Strict):
    kind: Literal["dog", "hound"] = "dog"
    name: str = Field(max_length=3)


class Bird(Strict):
    species: Literal["bird"]
    wings: Literal[2] = 2


class Owner(Strict):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    spare: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    flock: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(max_length=2)


class Tree(Strict):
    value: bool
    children: list[Tree] = Field(default_factory=list, max_length=1, description="below it")
    parent: Tree | None = None


class Sum(Strict):
    op: Literal["sum"] = "sum"
    left: Expression
    right: Expression


class Number(Strict):
    op: Literal["number"] = "number"
    value: bool


Expression = Annotated[Sum | Number, Field(discriminator="op")]


class Page(Strict, Generic[T]):
    items: list[T] = Field(max_length=1)


class Pair(NamedTuple):
    left: int
    right: bool


class Open(BaseModel):
    a: int = 1


class Names(Strict):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"a-b": 1}]})

    dashed: int = Field(alias="a-b", multiple_of=3, ge=0, le=10)
    pair: Pair


MODELS: list[type[BaseModel]] = [
    *[Nested, Usual, Times, Formats, Keys, Money, Owner, Tree, Sum, Page[Point], Page[Colour], Open, Names],
    RootModel[list[Point]],
    RootModel[dict[str, Colour]],
    RootModel[Cat | Dog | Bird | None],
]


def drawn(schema: Any) -> list[str]:
    grammar = compile_check(grammar_text(GrammarKind.JSON_SCHEMA, schema), load(), "f")
    return [text for seed in range(8) if (text := text_by(grammar, seed)) is not None]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_is_drawn_is_an_instance(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    texts = drawn(schema)
    assert texts
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        if model not in (Times, Money):
            model.model_validate_json(text)


@pytest.mark.parametrize(
    "rest",
    [
        r"\d*\.?\d*$",
        r"\d*\.?\d{0,2}0*$",
        r"(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*$)",
        r"(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d*\.\d*0*$)",
    ],
)
def test_a_decimal_in_a_string_is_one(rest: str) -> None:
    """Pydantic 2.11's patterns have look-aheads: the only ones that are written otherwise."""
    pattern = r"^(?!^[-+.]*$)[+-]?0*" + rest
    texts = drawn({"type": "string", "pattern": pattern})
    assert texts
    for text in texts:
        assert re.search(pattern, json.loads(text)) and Decimal(json.loads(text)).is_finite()


def test_what_tells_branches_apart_is_always_written() -> None:
    """It has a default, so that the schema lets it be left out: then more than one branch would fit."""
    schema = Owner.model_json_schema()
    assert "required" not in schema["$defs"]["Cat"] or "kind" not in schema["$defs"]["Cat"]["required"]
    for text in drawn(schema):
        assert json.loads(text)["pet"]["kind"] in ("cat", "dog", "hound")


def test_a_generic_is_found_by_its_name() -> None:
    """Older pydantic, and others, write names into references as they are."""
    for name, reference in (
        ("Page[int]", "#/$defs/Page[int]"),
        ("Page[int]", "#/$defs/Page%5Bint%5D"),
        ("a b/é%", "#/$defs/a b~1é%"),
        ("Map<str, int>", "#/$defs/Map<str, int>"),
    ):
        assert drawn({"$ref": reference, "$defs": {name: {"const": 7}}}) == ["7"] * 8


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (RootModel[set[int]].model_json_schema(), "f: the keyword 'uniqueItems'"),
        (Owner.model_json_schema() | {"discriminator": {"propertyName": "kind"}}, "f.discriminator is "),
        (
            RootModel[Annotated[Cat | Dog, Field(discriminator="kind")]].model_json_schema()
            | {"discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Dog"}}},
            "f.discriminator is ",
        ),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {}}}, "f: oneOf"),
        ({"oneOf": [Open.model_json_schema(), Point.model_json_schema()]}, "f: oneOf"),
    ],
)
def test_what_is_not_enforced_is_named(schema: Any, named: str) -> None:
    with pytest.raises(APIError) as caught:
        drawn(schema)
    assert caught.value.status == 400 and caught.value.message.startswith(named)
