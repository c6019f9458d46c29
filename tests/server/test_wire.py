"""What goes over the wire comes back as it was, and what cannot is refused by name."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import errors, types
from jaxinfer.errors import InvalidArgumentError, JaxinferError, UnsupportedError
from server import inference_pb2 as pb
from server import info, wire

text = st.text(max_size=20)
token_ids = st.integers(0, 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False)
params = st.builds(
    types.SamplingParams,
    n=st.integers(1, 128),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2**31 - 1),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=4),
    bad_words=st.none() | st.lists(st.text(min_size=1), max_size=4),
    include_stop_str_in_output=st.booleans(),
    logit_bias=st.none() | st.dictionaries(token_ids, st.floats(-100, 100), min_size=1, max_size=4),
    allowed_token_ids=st.none() | st.lists(token_ids, min_size=1, max_size=4),
    stop_token_ids=st.none() | st.lists(token_ids, max_size=4),
    max_tokens=st.none() | st.integers(100, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
)
prompts = (
    text
    | st.lists(token_ids, max_size=5)
    | st.lists(st.fixed_dictionaries({"role": text, "content": text}), min_size=1, max_size=3)
)
logprob = st.builds(types.TokenLogprob, token_ids, float32, st.integers(1, 2**31 - 1))
position = st.builds(types.PositionLogprobs, logprob, st.lists(logprob, max_size=3).map(tuple))
count = st.integers(0, 2**53)
seconds = st.floats(0, 1e9)
delta = st.builds(
    types.Delta,
    st.integers(0, 127),
    text,
    st.lists(token_ids, max_size=4).map(tuple),
    st.lists(position, max_size=3).map(tuple),
)
prompt_logprobs = st.builds(types.PromptLogprobs, st.lists(position, max_size=3).map(tuple))
end = st.builds(types.SampleEnd, st.integers(0, 127), st.sampled_from(types.FinishReason), st.none() | text | token_ids)
finished = st.builds(
    types.Finished,
    st.lists(end, max_size=3).map(tuple),
    st.builds(types.Usage, count, count, count),
    st.builds(types.Timings, seconds, seconds, seconds),
)


def sent(message):
    """As it is on the other side."""
    return type(message).FromString(message.SerializeToString())


@settings(max_examples=150, deadline=None)
@given(prompts, st.none() | params, st.none() | st.booleans(), st.none() | st.integers(-(2**31), 2**31 - 1))
def test_requests(prompt, params, parse_special, priority):
    parse_special = parse_special if isinstance(prompt, str) else None
    message = sent(
        wire.request_to_proto(prompt, params, request_id="it", parse_special=parse_special, priority=priority)
    )
    request = wire.request_from_proto(message, request_id=message.request_id)
    assert request.request_id == "it"
    kind = "text" if isinstance(prompt, str) else "messages" if prompt and isinstance(prompt[0], dict) else "token_ids"
    assert getattr(request, kind) == prompt
    assert (request.parse_special, request.priority) == (bool(parse_special), priority or 0)
    expected = params or types.SamplingParams(max_tokens=None)
    if expected.seed is not None and expected.seed >= 2**63:
        assert request.params.seed == expected.seed - 2**64  # the same 64 bits
        expected = replace(expected, seed=request.params.seed)
    assert request.params == expected


@settings(max_examples=150, deadline=None)
@given(delta | finished | prompt_logprobs)
def test_events(event):
    message = pb.GenerateResponse.FromString(wire.event_to_bytes("it", event))
    assert message.request_id == "it"
    assert wire.event_from_proto(message) == event


@settings(max_examples=100, deadline=None)
@given(st.lists(delta, max_size=6), st.none() | prompt_logprobs, finished)
def test_a_whole_generation(deltas, prompt_logprobs, finished):
    count = 3
    deltas = [replace(each, index=each.index % count) for each in deltas]
    ends = tuple(types.SampleEnd(index, types.FinishReason.STOP, "x") for index in range(count))
    finished = replace(finished, ends=ends)
    events = [*([] if prompt_logprobs is None else [prompt_logprobs]), *deltas, finished]
    made = wire.generation_from_proto(pb.UnaryGenerateResponse.FromString(wire.generation_to_bytes("it", events)))
    assert (made.request_id, made.prompt_logprobs) == ("it", prompt_logprobs)
    assert (made.usage, made.timings) == (finished.usage, finished.timings)
    assert tuple(sample.end for sample in made.samples) == ends
    for index, sample in enumerate(made.samples):
        mine = [each for each in deltas if each.index == index]
        assert sample.output == types.Delta(
            index,
            "".join(each.text for each in mine),
            sum((each.token_ids for each in mine), ()),
            sum((each.logprobs for each in mine), ()),
        )


def test_detokenize_can_be_switched_off():
    params = types.SamplingParams(detokenize=False, max_tokens=None)
    assert wire.params_from_proto(sent(wire.params_to_proto(params))) == params


def test_an_empty_list_of_allowed_tokens_is_not_an_absent_one():
    with pytest.raises(InvalidArgumentError, match=r"allowed_token_ids = \[\]"):
        wire.params_from_proto(pb.SamplingParams(allowed_token_ids=pb.TokenIds()))
    assert wire.params_from_proto(pb.SamplingParams()).allowed_token_ids is None


@pytest.mark.parametrize(("retry_after_s", "sent_ms"), [(None, None), (0.0, "1"), (0.0101, "11"), (2.5, "2500")])
def test_a_full_queue_says_when_to_come_again(retry_after_s, sent_ms):
    error = errors.QueueFullError("it is full")
    error.retry_after_s = retry_after_s
    status = wire.status_of(error)
    assert dict(status.trailing_metadata).get("grpc-retry-pushback-ms") == sent_ms

    class Failed(grpc.RpcError):
        code, details = lambda self: status.code, lambda self: status.message
        trailing_metadata = lambda self: status.trailing_metadata

    again = wire.error_of(Failed())
    assert type(again) is errors.QueueFullError
    assert again.retry_after_s == (None if sent_ms is None else int(sent_ms) / 1000)


def test_a_request_has_the_time_that_is_left():
    message = pb.GenerateRequest(text="a")
    assert wire.request_from_proto(message, request_id="it").timeout_s is None
    assert wire.request_from_proto(message, request_id="it", timeout_s=1.5).timeout_s == 1.5
    for over in (0.0, -1.0):
        with pytest.raises(errors.DeadlineExceededError):
            wire.request_from_proto(message, request_id="it", timeout_s=over)


def test_a_logprob_of_zero_probability():
    at = types.PositionLogprobs(types.TokenLogprob(1, -math.inf, 5), ())
    event = types.Delta(0, "", (1,), (at,))
    assert wire.event_from_proto(pb.GenerateResponse.FromString(wire.event_to_bytes("it", event))) == event


def test_zero_is_not_unset():
    zero = pb.SamplingParams(temperature=0, logprobs=0, skip_special_tokens=False, seed=0)
    assert wire.params_from_proto(zero) == types.SamplingParams(
        temperature=0.0, logprobs=0, skip_special_tokens=False, seed=0, max_tokens=None
    )


def test_the_proto_has_every_parameter_and_every_figure():
    def names(message) -> set[str]:
        return set(message.DESCRIPTOR.fields_by_name)

    def of(dataclass) -> set[str]:
        return {each.name for each in fields(dataclass)}

    assert names(pb.SamplingParams) == of(types.SamplingParams)
    assert {name.removeprefix("SERVER_STATE_").lower() for name in pb.ServerState.DESCRIPTOR.values_by_name} == {
        *info.ServerState,
        "unspecified",
    }
    assert names(pb.EngineStats) == of(types.EngineStats) | {"kv_use", "kv_tokens"}
    assert names(pb.GetModelInfoResponse) == of(info.ModelInfo)
    assert names(pb.Usage) == of(types.Usage)
    assert names(pb.Timings) == of(types.Timings)


def unknown(message):
    """With a field that this version does not know, as a newer client sends it."""
    return type(message).FromString(message.SerializeToString() + b"\xf8\x07\x01")  # field 127, varint 1


@pytest.mark.parametrize(
    "message",
    [
        unknown(pb.GenerateRequest(text="a")),
        pb.GenerateRequest(text="a", sampling_params=unknown(pb.SamplingParams())),
        pb.GenerateRequest(
            text="a", sampling_params=pb.SamplingParams(allowed_token_ids=unknown(pb.TokenIds(ids=[1])))
        ),
        pb.GenerateRequest(token_ids=unknown(pb.TokenIds(ids=[1]))),
        pb.GenerateRequest(messages=unknown(pb.ChatMessages())),
        pb.GenerateRequest(messages=pb.ChatMessages(messages=[unknown(pb.ChatMessage(role="user"))])),
    ],
)
def test_a_field_of_a_newer_client_is_refused_not_passed_over(message):
    with pytest.raises(UnsupportedError, match=r"field \[127\]"):
        wire.request_from_proto(message, request_id="it")


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateResponse(),
        pb.GenerateResponse(finished=pb.Finished(ends=[pb.SampleEnd()])),
        pb.GenerateResponse(finished=pb.Finished(ends=[pb.SampleEnd(finish_reason=99)])),
    ],
)
def test_what_only_a_newer_server_says(message):
    with pytest.raises(UnsupportedError):
        wire.event_from_proto(message)
    with pytest.raises(UnsupportedError):
        info.server_info_from_proto(pb.GetServerInfoResponse(state=99))


def test_every_error_has_a_status_and_its_code_as_metadata():
    for error in [*vars(errors).values(), wire.WarmingUpError, wire.UnauthenticatedError]:
        if isinstance(error, type) and issubclass(error, JaxinferError):
            made = error("f", 1, "2") if error is InvalidArgumentError else error("m")
            assert error.code in wire._STATUS_OF_CODE
            assert wire.status_of(made).trailing_metadata == ((wire.ERROR_CODE_KEY, error.code),)


def test_a_class_without_a_status_takes_its_parents():
    class OutOfPagesError(errors.QueueFullError):
        code = "out_of_pages"

    class StrangeError(JaxinferError):
        code = "strange"

    assert wire.status_of(OutOfPagesError("x"))[:2] == wire.status_of(errors.QueueFullError("x"))[:2]
    assert wire.status_of(StrangeError("x"))[:2] == wire.status_of(JaxinferError("x"))[:2]


def test_a_long_message_is_cut_to_what_a_status_can_carry():
    assert len(wire.status_of(JaxinferError("é" * 10_000)).message) < 1010


def test_the_proto_documents_every_code():
    from pathlib import Path

    proto = (Path(__file__).resolve().parents[2] / "server" / "inference.proto").read_text()
    for word, status in wire._STATUS_OF_CODE.items():
        assert any(line.split()[1:3] == [word, status.name] for line in proto.splitlines()), word
