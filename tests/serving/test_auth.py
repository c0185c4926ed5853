"""Keys files, and the pseudonym key."""

import hashlib
from pathlib import Path

import pytest

from serving.auth import Refused, load_keys, load_secret, pseudonym

DIGEST = hashlib.sha256(b"secret-key").hexdigest()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("keys.toml", f'[[keys]]\nsha256 = "{DIGEST}"\ntenant = "acme"\nscopes = ["feedback"]\n'),
        ("keys.json", f'{{"keys": [{{"sha256": "{DIGEST}", "tenant": "acme", "scopes": ["feedback"]}}]}}'),
    ],
)
def test_a_key_has_its_tenant_and_scopes(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    keys = load_keys(tmp_path / name)
    assert keys.check("Bearer secret-key", "feedback").tenant == "acme"
    with pytest.raises(Refused) as refused:
        keys.check("Bearer secret-key", "infer")
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[keys]\n", "not valid"),
        ("", "keys: Field required"),
        (f'[[keys]]\nsha256 = "{DIGEST}"\ntenant = "acme"\nscope = ["infer"]\n', "keys.0.scope"),
        ('[[keys]]\nsha256 = "plain-key"\ntenant = "acme"\n', "keys.0.sha256"),
    ],
)
def test_a_broken_keys_file_says_where(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        load_keys(tmp_path / "keys.toml")


def test_a_missing_keys_file_is_an_error_and_none_is_open(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_keys(tmp_path / "none.toml")
    assert load_keys(None).check(None, "admin").tenant == "default"


def test_the_pseudonym_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "serving" / "pseudonym.key"
    first = load_secret(path)
    assert load_secret(path) == first and len(first) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["pseudonym.key"]
    path.write_text("abcd")
    with pytest.raises(ValueError, match="2 bytes"):
        load_secret(path)


def test_a_user_has_another_pseudonym_at_another_tenant() -> None:
    secret = bytes(32)
    assert pseudonym(secret, "a", "bob") == pseudonym(secret, "a", "bob")
    assert pseudonym(secret, "a", "bob") != pseudonym(secret, "b", "bob")
