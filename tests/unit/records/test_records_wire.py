"""The wire format: nothing is lost, nothing foreign gets in."""

from __future__ import annotations

import struct
import time
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triune.errors import RecordError, WireError
from triune.records import (
    WIRE_VERSION,
    Experience,
    ExperienceId,
    Group,
    GroupId,
    Media,
    Pair,
    RolloutId,
    Source,
    Stop,
    Task,
    Text,
    Turn,
    content_hash,
    decode_group,
    encode_group,
)

DATA = Path(__file__).parents[2] / "data"
GROUP = GroupId("run", "train", "a/b.c%", 3)


def make_experience(member: int = 0, prompt: int = 5, response: int = 3, **changes) -> Experience:
    length = prompt + response
    mask = np.arange(length) >= prompt
    fields = {
        "id": ExperienceId(RolloutId(GROUP, member, 1), 0),
        "tokens": np.arange(length, dtype=np.int32) + 7,
        "action_mask": mask,
        "logprobs": np.where(mask, np.float32(-0.25), np.float32(np.nan)),
        "versions": np.where(mask, np.int32(4), np.int32(-1)).astype(np.int32),
        "reward": 0.5,
    }
    return Experience(**{**fields, **changes})


def make_group(*records, **changes) -> Group:
    task = Task(key="a/b.c%", data={"question": "1+1"}, workflow={"use": "math"}, info={"row": 3})
    return Group(**{"id": GROUP, "task": task, "records": records, **changes})


def assert_same(left, right) -> None:
    """Equal field by field; arrays by dtype, shape and value (NaN equals NaN); sequences by content."""
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, msgspec.Struct):
        assert type(left) is type(right)
        for name in left.__struct_fields__:
            assert_same(getattr(left, name), getattr(right, name))
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_same(left[name], right[name])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right or (left != left and right != right)


def rewrite_header(blob: bytes, change, *, major: int = WIRE_VERSION, minor: int = 9) -> bytes:
    """What a newer writer would have written: the header changed, sizes and checksum right again."""
    size = struct.unpack_from("<I", blob, 12)[0]
    header = msgspec.msgpack.decode(blob[16 : 16 + size])
    change(header)
    head = msgspec.msgpack.encode(header)
    body = struct.pack("<I", len(head)) + head + bytes(-len(head) % 8) + blob[16 + size + -size % 8 :]
    start = struct.pack("<4sBBH", b"TRIU", major, minor, 0)
    return start + struct.pack("<I", zlib.crc32(body, zlib.crc32(start))) + body


FULL = make_experience(
    1,
    temperature=np.linspace(0.5, 1, 8, dtype=np.float32),
    raw_logprobs=np.linspace(-1, 0, 8, dtype=np.float32),
    streams={
        "advantages": np.ones(8, np.float32),
        "teacher_ids": np.arange(16, dtype=np.int32).reshape(8, 2),
        "teacher_logprobs": np.zeros((8, 2), np.float32),
    },
    turns=(Turn(start=5, stop=8, reward=1.0, state_key="s", stop_reason=Stop.LENGTH),),
    reward=None,
    reward_parts={"exact": 1.0},
    is_valid=False,
    stop=Stop.TIMEOUT,
    source=Source.REPAIRED,
    parents=("x",),
    operators=("group_advantage",),
    priority=2.5,
    metrics={"length": 3.0},
    info={"deep": [1, {"a": None}]},
    messages=({"role": "user", "content": "é 😀"},),
    tools=({"name": "f"},),
    media=(Media(sha256="0" * 64, mime="image/png", uri="file:a.png", start=0, stop=2),),
)


def test_every_field_of_an_experience_survives_the_round_trip():
    group = make_group(make_experience(0), FULL, make_experience(2, prompt=0, response=0), info={"closed_s": 1.5})
    assert_same(group, decode_group(encode_group(group)))


def test_pairs_texts_and_an_empty_group_survive_the_round_trip():
    pair = Pair(chosen=make_experience(0), rejected=FULL, weight=0.5, margin=0.1, by="judge", info={"a": 1})
    text = Text(id="t", tokens=np.arange(4, dtype=np.int32), info={"url": "x"})
    for records in ((pair,), (text, text), (text, pair, FULL), ()):
        group = make_group(*records)
        assert_same(group, decode_group(encode_group(group)))


def test_an_experience_of_another_group_keeps_its_own_identity():
    other = ExperienceId(RolloutId(GroupId("other", "t", "k", 0), 2), 1, "critic", "planner")
    group = make_group(make_experience(0), make_experience(1, id=other))
    assert decode_group(encode_group(group)).experiences[1].id == other


text = st.text(st.characters(codec="utf-8"), max_size=8)
json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def experiences(draw, member: int) -> Experience:
    length = draw(st.integers(0, 12))
    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), dtype=bool)
    floats = st.lists(st.floats(width=32), min_size=length, max_size=length).map(lambda x: np.array(x, np.float32))
    whole = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=length, max_size=length)
    return Experience(
        id=ExperienceId(
            RolloutId(GROUP, member, draw(st.integers(0, 3))), draw(st.integers(0, 2)), draw(text), draw(text)
        ),
        tokens=np.array(draw(whole), np.int32),
        action_mask=mask,
        logprobs=draw(floats),
        versions=np.array(draw(whole), np.int32),
        temperature=draw(st.floats(0, 2) | floats),
        raw_logprobs=draw(st.none() | floats),
        streams=draw(st.dictionaries(text.filter(bool), floats, max_size=2)),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        reward_parts=draw(st.dictionaries(text, st.floats(), max_size=2)),
        is_valid=draw(st.booleans()),
        stop=draw(st.sampled_from(Stop)),
        source=draw(st.sampled_from(Source)),
        priority=draw(st.floats(allow_nan=False)),
        info=draw(st.dictionaries(text, json_like, max_size=2)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.data())
def test_any_group_survives_the_round_trip(data):
    records = [data.draw(experiences(member)) for member in range(data.draw(st.integers(0, 3)))]
    group = make_group(*records, info=data.draw(st.dictionaries(text, json_like, max_size=2)))
    blob = encode_group(group)
    assert_same(group, decode_group(blob))
    assert encode_group(decode_group(blob)) == blob


def test_a_reward_of_nan_is_written_as_not_known():
    (experience,) = decode_group(encode_group(make_group(make_experience(reward=float("nan"))))).experiences
    assert experience.reward is None


def test_numbers_of_numpy_in_free_fields_become_plain_numbers():
    group = make_group(make_experience(reward=np.float32(0.5), info={"n": np.int64(3)}, metrics={"m": np.float32(1)}))
    (experience,) = decode_group(encode_group(group)).experiences
    assert (experience.reward, experience.info, experience.metrics) == (0.5, {"n": 3}, {"m": 1.0})


@pytest.mark.parametrize("value", [object(), {1.5: lambda: 0}, 2**70])
def test_a_free_field_that_is_not_json_like_is_refused_with_the_group(value):
    with pytest.raises(RecordError, match="run/train/a%2Fb%2Ec%25/3"):
        encode_group(make_group(make_experience(info={"x": value})))


def test_arrays_are_read_only():
    (experience,) = decode_group(encode_group(make_group(FULL))).experiences
    for array in (experience.tokens, experience.action_mask, experience.logprobs, experience.advantages):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_changed_byte_anywhere_is_noticed():
    blob = encode_group(make_group(FULL))
    for place in [*range(24), *range(24, len(blob), 7), len(blob) - 1]:
        with pytest.raises(WireError):
            decode_group(blob[:place] + bytes([blob[place] ^ 0x41]) + blob[place + 1 :])


@pytest.mark.parametrize("keep", [0, 3, 15, 16, 40, -9, -1])
def test_a_truncated_blob_is_noticed(keep):
    with pytest.raises(WireError):
        decode_group(encode_group(make_group(FULL))[:keep])


def test_bytes_of_another_kind_and_pickles_are_refused():
    for foreign in (b"", b"PAR1" * 9, b"\x80\x05\x95 a pickle of something"):
        with pytest.raises(WireError):
            decode_group(foreign)


def test_a_header_that_lies_about_its_columns_is_refused():
    blob = encode_group(make_group(FULL))
    for field, value in (("columns", [["tokens", "<i4", [], None, 0, 9999]]), ("lengths", [2**40]), ("records", [{}])):
        with pytest.raises(WireError):
            decode_group(rewrite_header(blob, lambda header, f=field, v=value: header.update({f: v})))


def test_a_mask_with_fewer_bits_than_tokens_is_refused_and_not_filled_up():
    def shorter(header: dict) -> None:
        (mask,) = [column for column in header["columns"] if column[0] == "action_mask"]
        mask[5] -= 1

    with pytest.raises(WireError, match="a mask of 16 bits"):
        decode_group(rewrite_header(encode_group(make_group(make_experience(prompt=20, response=4))), shorter))


def test_turns_that_an_operator_took_away_leave_no_remains_of_their_unknown_fields():
    row = make_experience(unknown={"turns": [{"mood": "brave"}]})
    again = decode_group(encode_group(make_group(row)))
    assert again.experiences[0].turns == ()


def test_fields_of_a_newer_minor_version_are_kept_and_written_again():
    def newer(header: dict) -> None:
        header["colour"] = "green"
        header["task"]["difficulty"] = 0.5
        header["records"][0]["mood"] = {"a": [1]}
        header["records"][0]["turns"][0]["tool"] = "search"
        _, code, tail, rows, offset, size = header["columns"][0]
        header["columns"].append(["routed_experts", code, tail, rows, offset, size])

    group = decode_group(rewrite_header(encode_group(make_group(FULL)), newer))
    (experience,) = group.experiences
    assert group.unknown["colour"] == "green"
    assert experience.unknown["mood"] == {"a": [1]}
    assert_same(experience.replace(unknown={}), FULL)

    again = decode_group(encode_group(group.map(lambda e: e.replace(reward=1.0))))
    assert again.unknown == {"colour": "green", "task": {"difficulty": 0.5}}
    assert again.experiences[0].unknown["turns"] == [{"tool": "search"}]
    np.testing.assert_array_equal(again.experiences[0].unknown["routed_experts"], FULL.tokens)
    assert again.experiences[0].reward == 1.0


def test_unknown_fields_of_pairs_and_texts_are_kept():
    pair = Pair(chosen=make_experience(0), rejected=FULL, unknown={"source_url": "x"})
    record = Text(
        id="t", tokens=np.arange(2, dtype=np.int32), unknown={"lang": "de", "weights": np.ones(2, np.float32)}
    )
    assert_same(make_group(pair, record), decode_group(encode_group(make_group(pair, record))))


def test_a_newer_major_version_is_refused_with_what_to_do():
    blob = rewrite_header(encode_group(make_group(FULL)), lambda header: None, major=WIRE_VERSION + 1)
    with pytest.raises(WireError, match="upgrade triune"):
        decode_group(blob)


def test_a_blob_of_the_previous_version_is_read():
    group = decode_group((DATA / "group_v0.triu").read_bytes())
    first, second = group.experiences
    assert str(first.id) == "run/train/k/0/0.0/main.agent.0"
    assert first.tokens.tolist() == [256, 49, 43, 49, 50, 258]
    assert first.action_mask.tolist() == [False] * 4 + [True] * 2
    assert first.logprobs[4:].tolist() == [-0.5, -0.125]
    assert first.versions.tolist() == [-1, -1, -1, -1, 2, 2]
    assert (first.reward, first.stop, first.advantages.tolist()) == (1.0, Stop.DONE, [0, 0, 0, 0, 0.5, 0.5])
    assert (second.reward, second.stop, second.is_valid) == (None, Stop.TIMEOUT, False)
    assert second.unknown == {"note": "kept"}
    for experience in group.experiences:
        experience.check()
    assert_same(group, decode_group(encode_group(group)))


def test_a_blob_written_by_the_first_release_is_read_for_ever():
    group = decode_group((DATA / "group_v1.triu").read_bytes())
    assert_same(group, make_group(make_experience(0), FULL, Text(id="t", tokens=np.arange(3, dtype=np.int32))))


def test_content_hash_speaks_of_tokens_and_mask_only():
    first = make_experience(0)
    assert content_hash(first) == content_hash(make_experience(5, reward=None))
    assert content_hash(first) != content_hash(make_experience(0, prompt=4, response=4))
    assert content_hash(first) != content_hash(first.replace(tokens=first.tokens + 1))


def test_encoding_and_decoding_a_group_of_eight_takes_microseconds():
    group = make_group(*(make_experience(member, prompt=9, response=4) for member in range(8)))
    blob = encode_group(group)
    best = 1.0
    for _ in range(20):
        start = time.process_time()
        for _ in range(50):
            encode_group(group)
            decode_group(blob)
        best = min(best, (time.process_time() - start) / 50)
    assert best < 400e-6, f"{best * 1e6:.0f} microseconds"
