"""What the dashboard looks like while SmolLM2 135M serves: the pictures of the documents.

    python benchmarks/dashboard_screenshots.py [--output docs/images]

Some requests end first and leave their blocks to the prefix cache; others then run, one with three
choices that share the blocks of its prompt, while the page's own chat is answered. Needs the extras
llm, serve and browser, and chromium on PATH; letters look as in the documents with the font Inter.
"""

import argparse
import contextlib
import json
import re
import shutil
import threading
import urllib.request
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from serving import serving

MODEL = "smollm2-135m-instruct"
OPTIONS = {"max_num_seqs": 8, "num_blocks": 256, "max_model_len": 1024, "warmup": "lazy"}
SCREENS = (("dashboard-light", 1280, 1024, "light"), ("dashboard-dark-390", 390, 844, "dark"))
SYSTEM = "You are a helpful guide who knows the towns and mountains of Europe. " * 6
QUESTIONS = ("What is the capital of France?", "Tell me about the river there.")


def post(url: str, question: str, max_tokens: int, **fields) -> None:
    """Asks and waits for the end."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    # Those that still run when the pictures have been taken end with the server.
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=900) as response:
        response.read()


def together(url: str, requests: list[tuple[str, int, dict]]) -> list[threading.Thread]:
    """Starts requests."""
    threads = [
        threading.Thread(target=post, args=(url, question, count), kwargs=fields, daemon=True)
        for question, count, fields in requests
    ]
    for thread in threads:
        thread.start()
    return threads


def fill(url: str) -> None:
    """Requests that end and leave their blocks to the cache."""
    requests = [(f"Tell me about mountain {i}.", 40 + 30 * i, {"seed": i}) for i in range(5)]
    requests.append(("Name a river.", 30, {"n": 3}))
    for thread in together(url, requests):
        thread.join()


def take(browser: Browser, url: str, output: Path, screen: tuple[str, int, int, str]) -> None:
    """One picture, while requests run."""
    name, width, height, scheme = screen
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(url)
    page.locator("#link", has_text="Live").wait_for()
    fill(url)
    page.wait_for_timeout(6_000)
    threads = together(
        url,
        [
            ("Describe a walk through Prague.", 260, {}),
            ("Which mountains are in Austria?", 200, {}),
            ("What should I see in Lisbon?", 230, {}),
            ("How old is Rome?", 180, {}),
            ("Give three names for a boat.", 180, {"n": 3}),
        ],
    )
    page.get_by_label("Temperature").fill("0")
    for number, question in enumerate(QUESTIONS):
        page.locator("#send").wait_for(timeout=300_000)
        page.get_by_label("Message").fill(question)
        page.get_by_label("Message").press("Enter")
        answer = page.locator("#log .assistant .text").nth(number)
        answer.filter(has_text=re.compile(r"\w+ \w+")).wait_for(timeout=300_000)
    page.wait_for_timeout(1_500)
    page.mouse.click(1, 1)  # takes the focus away
    page.screenshot(path=output / f"{name}.png", full_page=width < 600)
    page.close()
    for thread in threads:
        thread.join()


def main() -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/images"), metavar="DIR")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    with serving(MODEL, **OPTIONS) as (_, url), sync_playwright() as playwright:
        fill(url)  # compiles
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for screen in SCREENS:
            take(browser, url, output, screen)
        browser.close()


if __name__ == "__main__":
    main()
