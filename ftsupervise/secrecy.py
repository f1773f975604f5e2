"""Finds secrets: by the name that one has, by the form of its value, and in a text in whatever way it is encoded.

One place for all rooms: the settings refuse what ``kind`` finds, ``launch`` and ``cron install`` leave out of an environment
what ``is_secret`` finds, and every error text passes through ``masked``. Names and forms are those of the services that people
use; a password of one's own invention is known by its name alone.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping

HIDDEN = "<secret>"
_LEAST = 4  # characters: what is shorter stands in half of all words

# ------------------------------------------------------------------------------------------------------------ by name

_ALWAYS = frozenset(
    """
    PASSWORD PASSWORDS PASSWD PASSPHRASE PASSCODE SECRET SECRETS TOKEN WEBHOOK WEBHOOKS APIKEY PAT CREDS
    """.split()  # noqa: SIM905 - a list of quoted words reads worse
)
# The last word of a name that is no secret after one of these words.
_MOSTLY = {
    "KEY": "PUBLIC CACHE SORT PRIMARY FOREIGN PARTITION IMAGE LABEL TEXT METRIC DICT HOT GROUP INDEX COLUMN STATE FEATURE",
    "PASS": "FORWARD BACKWARD FIRST SECOND ONE SINGLE MULTI NUM LAST RENDER BY",
    "PW": "",
    "PWD": "OLD SUBMIT WORK HOST",
    "HOOK": "GIT PRE POST EXEC EXIT COMMIT FORWARD BACKWARD IMPORT EXCEPT DISPLAY",
    "CREDENTIAL": "",
    "CREDENTIALS": "",
    "DSN": "",
    "AUTH": "ENABLE DISABLE REQUIRE USE NO",
}
_PLACES = frozenset({"KEY", "PWD", "CREDENTIAL", "CREDENTIALS"})  # these name files and folders too
_SERVICES = frozenset(
    """
    APPRISE SLACK DISCORD TEAMS HEALTHCHECKS HEALTHCHECK HC PING HOOK WEBHOOK SENTRY
    """.split()  # noqa: SIM905
)  # whose addresses are secrets
_QUALIFIERS = re.compile(
    r"\d+|PROD|PRODUCTION|DEV|STAGING|TEST|OLD|NEW|BACKUP|VALUE|STRING|BASE|B64|BASE64|DEFAULT|LIST"
)
_JOINED = re.compile(
    r"(?:PASSWORD|PASSWD|PASSPHRASE|WEBHOOK|APIKEY|ACCESSKEY|SECRETKEY|PRIVATEKEY)$"
    r"|^(?:SSH|SMTP|LDAP|DB|REDIS|MAIL|FTP|HTTP)PASS$|(?:AUTH|API|ACCESS|BOT|BEARER|HUB|LAB)TOKENS?$"
)
_PLAIN = re.compile(r"(?:0|1|true|false|yes|no|on|off|none|null)?", re.IGNORECASE)
_PLACE = re.compile(r"~?(?:/[\w.+@-]+)+/?")


def by_name(name: str) -> bool:
    """Return whether a variable or a setting of this name holds a secret: SMTP_PASS, HF_TOKEN, APPRISE_URLS,
    PAGERDUTY_KEY, apiKey …

    Names of the place of a secret (``…_FILE``, ``…_ENV``, ``…_PATH``) do not.
    """
    return _last_word(name) != ""


def _last_word(name: str) -> str:
    """Return the word that makes the name one of a secret; "" if none does."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()
    words = [word for word in re.split(r"[_.\s-]+", split) if word]
    while len(words) > 1 and _QUALIFIERS.fullmatch(words[-1]):
        words.pop()
    if not words:
        return ""
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _ALWAYS or _JOINED.search(last):
        return last
    if last in ("URL", "URLS", "URI") and (_SERVICES & set(words) or before in _ALWAYS):
        return last
    if last == "TOKENS" and before in ("AUTH", "API", "ACCESS", "BOT", "REFRESH"):
        return last
    if last not in _MOSTLY or before in _MOSTLY[last].split():
        return ""
    return last if before or last.startswith("CREDENTIAL") else ""


# ----------------------------------------------------------------------------------------------------------- by value

WITH_PASSWORD = "an address with a password in it"
_SCHEME = r"\b[A-Za-z][A-Za-z0-9+.-]{1,30}://"
_FORMS = (
    ("a private key", r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----"),
    ("a Slack token", r"\bxox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{4,}|\bxapp-[A-Za-z0-9-]{8,}"),
    ("a Slack webhook", r"\bhooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/[^\s\"'<>]+"),
    ("a Discord webhook", r"\bdiscord(?:app)?\.com/api/(?:v\d+/)?webhooks/[^\s\"'<>]+"),
    ("a Teams webhook", r"\b(?:webhook\.office\.com|logic\.azure\.com)[:\d]*/[^\s\"'<>]{20,}"),
    ("a Google Chat webhook", r"\bchat\.googleapis\.com/v1/spaces/[^\s\"'<>]+"),
    ("a ping address", r"\bhc-ping\.com/[^\s\"'<>]{8,}|\bnosnch\.in/[a-z0-9]{8,}"),
    ("a Telegram token", r"\b\d{8,10}:[A-Za-z0-9_-]{35}\b"),
    ("a GitHub token", r"\bgh[opusr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"),
    ("a GitLab token", r"\bgl(?:pat|dt|cbt|rt|soat)-[A-Za-z0-9_-]{16,}"),
    ("a Hugging Face token", r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    ("an API key", r"\bsk-(?:(?:proj|ant|svcacct|or-v1)-[A-Za-z0-9_-]{16,}|[A-Za-z0-9]{20,})"),
    (
        "an API key",
        r"\b[srp]k_(?:live|test)_[A-Za-z0-9]{16,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\b(?:npm|r8|gsk)_[A-Za-z0-9]{24,}",
    ),
    ("an API key", r"\b(?:dop_v1_|dckr_pat_|pypi-|nvapi-|lin_api_|tskey-)[A-Za-z0-9_-]{24,}|\bdapi[0-9a-f]{32}"),
    ("an AWS key", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    ("a Google key", r"\bAIza[A-Za-z0-9_-]{35}|\bya29\.[A-Za-z0-9_-]{20,}"),
    ("a signed token", r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"),
    ("an Authorization header", r"(?i:\bauthorization[\"']?\s{0,9}[:=]\s{0,9}[\"']?\w{1,20}\s{1,9})(?!\$)[^\s\"']{8,}"),
    ("the path of a Slack webhook", r"(?<![\w.-])/services/[TE][A-Z0-9]{6,}/B[A-Z0-9]{6,}/[A-Za-z0-9]{16,}"),
    (WITH_PASSWORD, rf"{_SCHEME}[^\s/:@\"']{{0,200}}:(?!\$)[^\s/@\"']{{1,300}}@"),
    ("an address with a token in it", rf"{_SCHEME}(?!\$)[A-Za-z0-9_-]{{20,300}}@"),
    (
        "an address with a key in it",
        r"(?i:[?&](?:access_token|api_?key|auth|key|password|secret|sig|signature|token|x-amz-signature)=)(?!\$)[^\s&\"'<>]{8,}",
    ),
    (
        "an Apprise address",
        (
            r"\b(?:slack|discord|msteams|tgram|pover|pbul|pagerduty|opsgenie|sendgrid|mailgun|twilio|join|gotifys?|zulip"
            r"|rockets?|mmosts?|matrixs?|ifttt|notica|simplepush)://[^\s\"'<>]{12,}"
        ),
    ),
)
_AFTER_THE_HOST = re.compile(
    r"[./]*/(?:(?:services|workflows|triggers)/[TE][A-Z0-9]+(?:/.*)?|api/(?:v\d+/)?webhooks/\d.*|v1/spaces/.*|webhookb2/.*"
    r"|(?:ping/)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?:/.*)?)",
    re.DOTALL,
)
_ANY = re.compile("|".join(f"(?:{form})" for _, form in _FORMS))


def kind(text: str) -> str:
    """Return the name of the secret that stands in ``text`` by its form, as "a Slack token"; "" when none is known."""
    if not _ANY.search(text):
        return ""
    return next(word for word, form in _FORMS if re.search(form, text))


def is_secret(name: str, value: str) -> bool:
    """Return whether the environment variable ``name`` with this ``value`` is a secret.

    A switch ("1", "off") or an empty value is none, nor is the path of a key file.
    """
    if _PLAIN.fullmatch(value):
        return False
    if kind(value):
        return True
    last = _last_word(name)
    return bool(last) and not (last in _PLACES and _PLACE.fullmatch(value))


def like_a_file(text: str) -> bool:
    """Return whether ``text`` is surely a path, though no '/', '~' or '.' at its beginning says so, and no secret in
    its place.

    Letters, '.', '_' and '-', an ending for a digit: "slack-token", "hooks/run-7.txt".
    """
    parts = text.split("/")
    plain = all(re.fullmatch(r"[A-Za-z._-]{1,60}|[\w.-]{1,60}\.[a-z]{1,5}", part) for part in parts if part)
    return bool(text) and plain and not kind(text)


def like_an_address(text: str) -> bool:
    """Return whether ``text``, which begins as a path does, follows the host in the address of a hook, and so a secret?
    "/services/T00/B00/…" of Slack, "/api/webhooks/123/…" of Discord, "/v1/spaces/…" of Google Chat, the UUID of a ping."""
    return _AFTER_THE_HOST.fullmatch(text) is not None or bool(kind(text))


def like_a_variable(text: str) -> bool:
    """Return whether ``text`` is the name of a variable as people write it, in capitals, and no secret in its place."""
    random = len(text) >= 16 and "_" not in text and any(char.isdigit() for char in text)
    return re.fullmatch(r"[A-Z_][A-Z0-9_]*", text) is not None and not random and not kind(text)


def without(
    env: Mapping[str, str], *, named: Collection[str] = (), kept: Collection[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return ``env`` without its secrets, and the names that were left out, sorted.

    ``named``: variables that hold a secret because the settings say so; ``kept``: those that stay all the same.
    """
    out = {key for key, value in env.items() if key in named or (key not in kept and is_secret(key, value))}
    return {key: value for key, value in env.items() if key not in out}, tuple(sorted(out))


def assigned(script: str) -> str:
    """Return the first variable with the name of a secret that shell lines set to a literal value (not ``$…``); "" if
    none does.
    """
    for name, value in re.findall(r"(?:^|[\s;&|(])([A-Za-z_]\w*)=((?:\"[^\"]*\"|'[^']*'|[^\s;&|])*)", script):
        word = value.strip("\"'")
        if word and not word.startswith(("$", "`")) and is_secret(name, word):
            return str(name)
    return ""


# ----------------------------------------------------------------------------------------------------------- in a text


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` with ``secrets``, and whatever else is one by its form, replaced by "<secret>".

    Found as they stand, %-encoded in whole or in part (once or twice), with backslashes or ``\\uXXXX``, and in base64, also as
    a part of something longer, as ``user:password`` in an Authorization header is. Secrets of less than 4 characters are
    not looked for.
    """
    known = sorted({secret for secret in secrets if len(secret) >= _LEAST}, key=len, reverse=True)
    for secret in known:
        text = re.sub("|".join((_spelled(secret), *_in_base64(secret))), HIDDEN, text)
    return _ANY.sub(HIDDEN, text)


def _spelled(secret: str) -> str:
    """Return a pattern for ``secret`` with each of its characters as itself or encoded."""
    return "".join(map(_character, secret))


def _character(char: str) -> str:
    raw = char.encode("utf-8", "surrogateescape")
    percent = "".join(f"%(?:25)?{_hex(byte)}" for byte in raw)
    escaped = rf"\\{{1,4}}(?:u(?i:{ord(char):04x})|x(?i:{ord(char):02x}))" if ord(char) < 0x10000 else ""
    in_bytes = "".join(rf"\\{{1,4}}x{_hex(byte)}" for byte in raw)
    forms = [rf"\\{{0,4}}{re.escape(char)}", percent, in_bytes, *filter(None, (escaped,))]
    if char == " ":
        forms.append(r"\+")
    return f"(?:{'|'.join(forms)})"


def _hex(byte: int) -> str:
    return f"(?i:{byte:02x})"


def _in_base64(secret: str) -> list[str]:
    """Patterns for ``secret`` in base64, both alphabets, at each of the three places it can have in a group of three bytes.

    Characters that its neighbours have a part in are left out; what is too short to be told from chance is not looked for.
    """
    raw = secret.encode("utf-8", "surrogateescape")
    patterns = []
    for before in range(3):
        coded = b64encode(b"\0" * before + raw).decode().rstrip("=")
        core = coded[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6]
        if len(core) < _LEAST:
            continue
        letters = {"+": r"(?:[+-]|%2[bB])", "/": r"(?:[/_]|%2[fF])"}
        body = "".join(letters.get(letter, letter) for letter in core)
        # the letters at both ends that are partly the neighbours' go too, and the padding
        patterns.append(rf"{'[A-Za-z0-9+/_-]?' if before else ''}{body}[A-Za-z0-9+/_-]?(?:=|%3[dD]){{0,2}}")
    return patterns
