"""The dashboard in a real browser, over live servers of the toy model."""

import contextlib
import re
import shutil
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.byte_tokenizer import TEMPLATE
from tests.server.harness import serving, toy_llm

pytestmark = pytest.mark.browser

SIZES = {
    "max_num_seqs": 4,
    "block_size": 4,
    "num_blocks": 256,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
}
SCREENS = [
    pytest.param((width, scheme), id=f"{width}-{scheme}")
    for width in (1280, 390)
    for scheme in ("light", "dark")
]
NUM_TOKENS = 150
"""For seconds, while states of the engine come twice a second."""


@contextlib.contextmanager
def served(toy, *, template: str | None = TEMPLATE, port: int = 0, **options) -> Iterator[str]:
    """Address of a server that lives as long as the block."""
    llm = toy_llm(toy, template=template, **SIZES)
    step = llm._engine.step

    def slow_step():
        time.sleep(0.02)
        return step()

    # The toy model is through with an answer before the page has seen one state of it.
    llm._engine.step = slow_step  # type: ignore[method-assign]
    with serving(llm, shutdown_timeout=1, port=port, **options) as running:
        yield running.url


@pytest.fixture(scope="module")
def url(toy):
    with served(toy) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path is not None, "these tests need chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page, and what went wrong in it."""

    def __init__(self, browser, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.complaints: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(request.url))
        self.page.on("response", self._check)

    def _hear(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _check(self, response) -> None:
        if response.status >= 400:
            self.complaints.append(f"{response.status} {response.url}")

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.wait_for_link("Live")

    def wait_for_text(self, where: str, text: str) -> None:
        self.page.locator(where, has_text=re.compile(f"^{text}$")).wait_for()

    def wait_for_link(self, text: str) -> None:
        self.page.locator("#link", has_text=text).wait_for()

    def ask(self, text: str, num_tokens: int = NUM_TOKENS) -> None:
        self.page.get_by_label("Max tokens").fill(str(num_tokens))
        self.page.get_by_label("Temperature").fill("0")
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_label("Message").press("Enter")

    def wait_for_end(self) -> str:
        """Returns the note below the answer."""
        self.page.locator("#send").wait_for()
        return self.page.locator("#log .note").last.text_content()

    def answer(self) -> str:
        return self.page.locator("#log .assistant .text").last.evaluate("node => node.textContent")

    def count_cells(self, kind: int) -> int:
        return self.page.locator(f'#map [data-kind="{kind}"]').count()

    def wait_for_cells(self, kind: int) -> None:
        self.page.locator(f'#map [data-kind="{kind}"]').first.wait_for()

    def assert_fits(self) -> None:
        width, room = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= room


@pytest.fixture
def watched(browser):
    found = Watched(browser)
    yield found
    found.context.close()


@pytest.mark.parametrize("screen", SCREENS)
def test_a_chat_is_streamed_and_its_blocks_are_shown(browser, url, screen):
    watched = Watched(browser, *screen)
    page = watched.page
    watched.open(url)
    watched.assert_fits()
    assert page.locator("#map > div").count() == SIZES["num_blocks"]
    owned, cached = watched.count_cells(2), watched.count_cells(1)
    assert owned == 0

    question = f"<b>{screen[0]} {screen[1]}</b>"
    watched.ask(question)
    watched.wait_for_cells(2)
    page.locator("#running-table tbody tr").wait_for()
    assert watched.answer() or page.locator("#stop").is_visible()
    watched.assert_fits()
    watched.wait_for_end()
    watched.wait_for_text("#kind-2", "0")
    assert watched.count_cells(1) > cached
    assert int(page.locator("#kind-1").text_content()) == watched.count_cells(1)
    watched.assert_fits()

    assert page.locator("#log b").count() == 0
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
    direct = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert watched.answer() == direct["choices"][0]["message"]["content"]

    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
    assert (int(red) > 128) == (screen[1] == "light")
    assert watched.complaints == []
    watched.context.close()


def test_a_conversation_goes_on(watched, url):
    watched.open(url)
    watched.ask("one", 5)
    watched.wait_for_end()
    first = watched.answer()
    watched.ask("two", 5)
    watched.wait_for_end()
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
    ]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0}
    direct = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert watched.answer() == direct["choices"][0]["message"]["content"]
    watched.page.get_by_role("button", name="New").click()
    assert watched.page.locator("#log .turn").count() == 0
    assert watched.complaints == []


def test_stop_ends_the_request(watched, url):
    watched.open(url)
    watched.ask("stop me", 480)
    watched.wait_for_cells(2)
    watched.page.get_by_role("button", name="Stop").click()
    assert watched.wait_for_end() == "Stopped."
    watched.wait_for_text("#running", "0")


def test_the_map_is_walked_by_keyboard_and_mouse(watched, url):
    watched.open(url)
    page = watched.page
    cells = page.locator("#map > div")
    cells.nth(2).hover()
    assert page.locator("#tip").text_content().startswith("Block 3: ")
    page.mouse.move(0, 0)
    assert page.locator("#tip").is_hidden()
    page.locator("#map").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#map-live").text_content().startswith("Block 2: ")


def test_the_theme_is_kept(watched, url):
    watched.open(url)
    page = watched.page
    page.get_by_role("button", name="Use dark colours").click()
    page.reload()
    page.get_by_role("button", name="Use light colours").wait_for()


def test_a_key_is_asked_for_and_errors_are_told(watched, toy):
    page = watched.page
    with served(toy, template=None, api_key="secret") as url:
        page.goto(url)
        watched.wait_for_link("Key needed")
        for key, where, told in (("wrong", "#key-note", "refused"), ("secret", "#link", "Live")):
            page.get_by_role("textbox", name="API key").fill(key)
            page.get_by_role("button", name="Connect").click()
            page.locator(where, has_text=told).wait_for()
        assert page.locator("#key").is_hidden()
        watched.ask("hello")
        assert "no chat template" in watched.wait_for_end()
        assert page.get_by_label("Message").input_value() == "hello"
    watched.wait_for_link("Reconnecting")
    with served(toy, port=int(url.rpartition(":")[2]), api_key="secret"):
        watched.wait_for_link("Live")
