"""Whether the Hugging Face hub can be reached, asked once and quickly.

The hub's own libraries retry every file for half a minute before they look into their cache. Whatever loads by a hub
name does it inside `hub_or_cache()`: online as usual, offline from the local cache at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

PROBE_TIMEOUT_S = 5.0


@cache
def hub_answers() -> bool:
    """Whether anything answers at the hub's address within `PROBE_TIMEOUT_S`; the answer is kept for the process."""
    import urllib.error
    import urllib.request

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True  # any answer is an answer
    except OSError:
        return False
    return True


@contextmanager
def hub_or_cache() -> Iterator[bool]:
    """While inside, the hub's libraries look only into their local cache if the hub does not answer.

    Yields whether it does.
    """
    from huggingface_hub import constants

    answers = hub_answers()
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE = before
