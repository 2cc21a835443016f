import pytest

from gyre_proxy.address import AddressError, parse_address
from gyre_proxy.workers.placed import execution_of, path_of


@pytest.mark.parametrize(
    ("path", "execution", "agent", "rest", "wire"),
    [
        ("/x/e1/v1/messages", "e1", None, "v1/messages", "anthropic"),
        ("/x/e1/v1/messages/count_tokens", "e1", None, "v1/messages/count_tokens", "anthropic"),
        ("/x/e1/v1/chat/completions", "e1", None, "v1/chat/completions", "openai_chat"),
        ("/x/e1/a/sub-2/v1/messages", "e1", "sub-2", "v1/messages", "anthropic"),
        ("/x/run_1.a/v1/models", "run_1.a", None, "v1/models", None),
        ("/x/e1/api/hello", "e1", None, "api/hello", None),
        ("/x/e1/", "e1", None, "", None),
    ],
)
def test_an_address_names_execution_agent_and_wire(path, execution, agent, rest, wire):
    address = parse_address(path)
    assert (address.execution, address.agent, address.rest, address.wire) == (execution, agent, rest, wire)


@pytest.mark.parametrize(
    ("path", "mend"),
    [
        ("/x/e1/v1/v1/messages", "ends in /v1 and this client adds it; use .../x/e1"),
        ("/x/e1/a/b/v1/v1/messages", "use .../x/e1/a/b"),
        ("/x/e1/messages", "use .../x/e1/v1"),
        ("/x/e1/chat/completions", "does not add /v1"),
        ("/v1/messages", "use http://HOST:PORT/x/<any name>"),
        ("/x/", "use http://HOST:PORT/x/<any name>"),
        ("/x/%2e%2e/v1/messages", "choose another execution name"),
        ("/x/e1/a/../v1/messages", "choose another agent name"),
    ],
)
def test_a_wrong_address_is_answered_with_the_right_one(path, mend):
    with pytest.raises(AddressError, match=mend.replace(".", r"\.").replace("/x/<", "/x/<")):
        parse_address(path)


@pytest.mark.parametrize(
    ("target", "execution"),
    [
        ("/x/e1/v1/messages?beta=true", "e1"),
        ("/x/%651/v1/messages", "e1"),
        ("/x%2Fe1%2Fv1/messages", "e1"),
        ("//x/e1/v1/messages/", "e1"),
        ("http://127.0.0.1:8765/x/e1/v1/messages", "e1"),
        ("/x/e1#b/v1/messages", "e1"),
        ("/api/status", None),
        ("/x/", None),
        ("*", None),
        ("\x00", None),
    ],
)
def test_a_connection_goes_where_its_address_says(target, execution):
    assert execution_of(path_of(f"POST {target} HTTP/1.1\r\nhost: h\r\n\r\n".encode())) == execution
