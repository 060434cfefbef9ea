"""What a response says after its thinking: the part that verifiers judge."""

from slipstream.rewards.fences import without_code

_OPENING = ("<think>", "<thinking>")
_CLOSING = ("</think>", "</thinking>")


def after_thinking(response: str, prompt: str = "") -> str | None:
    """Return what follows the last '</think>' or '</thinking>', the whole response where there is none.

    None if the thinking has no end, whether the response or the prompt began it: a truncated response must not be paid
    for a guess that it was still weighing.
    """
    end = max((response.rfind(tag) + len(tag) for tag in _CLOSING if tag in response), default=0)
    rest = response[end:]
    if any(tag in rest for tag in _OPENING) or (not end and prompt.rstrip().endswith(_OPENING)):
        return None
    return rest


def after_thinking_in_markdown(response: str, prompt: str = "") -> str | None:
    """As `after_thinking`, but tags in fenced blocks and inline code of the answer are part of it.

    What begins with thinking, in the response or the prompt, has it up to the first closing tag at least.
    """
    start = 0
    if prompt.rstrip().endswith(_OPENING) or response.lstrip().startswith(_OPENING):
        ends = [response.find(tag) + len(tag) for tag in _CLOSING if tag in response]
        if not ends:
            return None
        start = min(ends)
    rest = response[start:]
    visible = without_code(rest)
    end = max((visible.rfind(tag) + len(tag) for tag in _CLOSING if tag in visible), default=0)
    return None if any(tag in visible[end:] for tag in _OPENING) else rest[end:]
