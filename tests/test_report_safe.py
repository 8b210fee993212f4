from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook.report import safe

PNG = "data:image/png;base64,iVBORw0KGgo/root/AAA="


@pytest.mark.parametrize(
    ("html", "cleaned"),
    [
        ("<p>a <b>b</b></p>", "<p>a <b>b</b></p>"),
        ("a<script>alert(1)</script>b", "ab"),
        ("<style>.x{}</style><p>c</p>", "<p>c</p>"),
        ('<p onclick="x()" style="position:fixed" id="top">c</p>', "<p>c</p>"),
        ('<a href="javascript:alert(1)">c</a>', "<a>c</a>"),
        ('<a href="https://docs.vllm.ai/">c</a>', '<a href="https://docs.vllm.ai/">c</a>'),
        ('<iframe src="http://e.test"></iframe><form action="/x">c</form>', "\nc"),
        ('<meta http-equiv="refresh" content="0;url=http://e.test">', ""),
        ("<div><table><tr><td>open", "<div><table><tbody><tr><td>open</td></tr></tbody></table></div>"),
        (f'<img alt="a" src="{PNG}">', f'<img alt="a" src="{PNG}">'),
        (
            '<img alt="a &lt; b" src="http://e.test/p.png">',
            '<span class="missing">[picture not embedded: a &lt; b]</span>',
        ),
        ('<img src="p.png">', '<span class="missing">[picture not embedded: no description]</span>'),
    ],
)
def test_only_harmless_markup_is_left(html: str, cleaned: str) -> None:
    assert safe.clean(html) == cleaned


@given(st.text(alphabet="<>\"'= /abcimgscriptonerrorhref:&;#", max_size=80))
def test_nothing_executable_or_remote_survives(text: str) -> None:
    cleaned = safe.clean(text).lower()
    for forbidden in ("<script", "<iframe", "<style", "<form", "<meta", "<link", "<object"):
        assert forbidden not in cleaned
    assert "<img" not in cleaned  # without data there is no picture


def test_machine_paths_become_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    scrub = safe.scrubber(tmp_path / "outputs" / "v" / "r")
    checkout = Path(safe.__file__).resolve().parents[3]
    assert scrub(f"{tmp_path}/outputs/v/r/server-00.log") == "outputs/v/r/server-00.log"
    assert scrub(f"in {checkout}/lib/perfbook/cli.py, line 3") == "in lib/perfbook/cli.py, line 3"
    assert scrub(f"cd {checkout}") == "cd ."
    assert scrub(f"{checkout}-other") != "-other"
    assert scrub("/home/ada/models/x and /Users/bob/y and /root/z") == "~/models/x and ~/y and ~/z"
    assert scrub("/opt/v/lib/python3.11/site-packages/vllm/config.py") == "site-packages/vllm/config.py"
    assert scrub("http://host/root/x /rootless /var/lib") == "http://host/root/x /rootless /var/lib"


def test_pictures_are_left_alone_by_changes_to_the_text_around_them() -> None:
    html = f'<p>/root/a</p><img src="{PNG}"><p>/root/b</p>'
    assert (
        safe.outside_pictures(lambda text: text.replace("/root", "~"), html) == f'<p>~/a</p><img src="{PNG}"><p>~/b</p>'
    )
