"""The dashboard in a real browser: Chromium without a window, as somebody sees it who opens the page."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from playwright.async_api import Page, ViewportSize, async_playwright, expect

from tests.integration.router_harness import DEADLINE_S, Setup, async_test, fails, running, until

pytestmark = pytest.mark.slow

DESKTOP = ViewportSize(width=1400, height=900)
PHONE = ViewportSize(width=390, height=844)
SCHEDULING = {"admission": "early", "ttft_slo_ms": 30_000.0, "tbt_slo_ms": 5_000.0}
FAST_HEALTH = {"interval_ms": 50, "startup_interval_ms": 50, "failure_threshold": 1}
expect.set_options(timeout=DEADLINE_S * 1e3)


class Opened(msgspec.Struct):
    """`troubles`: what the page complained of in its console, its uncaught errors, requests that failed."""

    page: Page
    troubles: list[str]


@asynccontextmanager
async def opened(
    setup: Setup, viewport: ViewportSize = DESKTOP, scheme: str = "light"
) -> AsyncIterator[Opened]:
    """The page, open. Whatever it asks for that is not the router's would count as a trouble."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program is not None, (
        "no Chromium: scripts/test installs it as root, else: apt-get install chromium"
    )
    origin = f"http://127.0.0.1:{setup.port}/"
    troubles: list[str] = []
    async with async_playwright() as playwright:
        # Its sandbox does not start for root, and what it opens here is our own page.
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        context = await browser.new_context(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        page = await context.new_page()
        page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith(origin) else troubles.append(sent.url))
        await page.goto(f"{origin}dashboard")
        try:
            yield Opened(page, troubles)
        finally:
            await browser.close()


async def ask(setup: Setup, number: int, headers: str = "") -> int:
    body = {"model": "m", "prompt": [*range(160), *([1000 + number] * 16)], "max_tokens": 6, "stream": True}
    return (await setup.ask("/v1/completions", body, headers)).status


async def drawn(page: Page, chart: str, colour: str) -> bool:
    """Whether the canvas shows a line: pixels of its colour, a variable of the style sheet."""
    return bool(
        await page.evaluate(
            """([id, colour]) => {
                const canvas = document.querySelector(`#${id} canvas`);
                const probe = document.createElement("canvas").getContext("2d");
                const style = getComputedStyle(document.documentElement);
                probe.fillStyle = style.getPropertyValue(colour).trim();
                probe.fillRect(0, 0, 1, 1);
                const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
                const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                for (let i = 0; i < pixels.length; i += 4) {
                    const far = Math.hypot(pixels[i] - r, pixels[i + 1] - g, pixels[i + 2] - b);
                    if (far < 12 && pixels[i + 3] > 250) return true;
                }
                return false;
            }""",
            [chart, colour],
        )
    )


@async_test
async def test_it_shows_traffic_as_it_happens() -> None:
    async with (
        running(mixed=2, policy="global_cache_aware", scheduling=SCHEDULING) as setup,
        opened(setup) as o,
    ):
        page = o.page
        await expect(page.locator("#verdict")).to_contain_text("All 2 engines are up")
        await until(lambda: setup.router.watch.history.num_rows > 0)
        assert [await ask(setup, number) for number in range(8)] == [200] * 8
        assert await ask(setup, 9, "x-slo-ttft-ms: 0.001\r\n") == 429
        await expect(page.locator("#verdict")).to_contain_text("1 request was rejected in the last minute")
        await expect(page.locator("#tiles")).to_contain_text("SLO 30 s · 100 % met it")
        for engine in setup.engines.values():
            await expect(page.locator("#engines")).to_contain_text(engine.url.removeprefix("http://"))
        await expect(page.locator("#prefixes tbody tr")).to_have_count(1)
        await expect(page.locator("#prefixes")).to_contain_text("≥ 128")
        await expect(page.locator("#rejections")).to_contain_text("TTFT SLO")
        # p95 is drawn over p50, which may lie under it.
        lines = {"requests": "--accent", "ttft": "--accent-2", "tbt": "--accent-2", "hits": "--accent"}
        for chart, colour in lines.items():
            for _ in range(int(DEADLINE_S)):
                if await drawn(page, f"chart-{chart}", colour):
                    break
                assert await ask(setup, 1) == 200
                await page.wait_for_timeout(700)
            else:
                raise AssertionError(f"{chart} shows nothing")
        assert o.troubles == []


@async_test
async def test_a_decision_opens_and_stays_open_while_the_page_goes_on() -> None:
    async with running(mixed=2, policy="global_cache_aware") as setup, opened(setup) as o:
        page = o.page
        assert await ask(setup, 1) == 200
        first = page.locator("#decisions details").first
        await first.locator("summary").focus()
        await page.keyboard.press("Enter")
        await expect(first).to_contain_text("least TTFT")
        await expect(first.locator("tbody tr")).to_have_count(2)
        await expect(first).to_contain_text("chosen")
        assert await ask(setup, 2) == 200
        await until(lambda: setup.router.watch.history.num_rows > 2)
        await page.wait_for_timeout(3000)
        assert await page.locator("#decisions details").count() == 1
        await page.keyboard.press("Enter")
        await expect(page.locator("#decisions details")).to_have_count(2)
        assert o.troubles == []


@async_test
async def test_what_is_wrong_is_said_in_words() -> None:
    async with running(mixed=2, health=FAST_HEALTH) as setup, opened(setup) as o:
        page, engine = o.page, setup.engines["m1"]
        await expect(page.locator("#verdict")).to_contain_text("All 2 engines are up")
        engine.healthy, engine.default = False, fails(500)
        await expect(page.locator("#verdict")).to_contain_text(f"{engine.url} is down (status 500)")
        await expect(page.locator("#engines .bad")).to_have_text("down")
        await expect(page).to_have_title("■ mooncake-router")
        await expect(page.locator("#prefixes")).to_contain_text("this policy does not read them")
        assert o.troubles == []


@async_test
async def test_an_slo_set_while_it_runs_is_drawn() -> None:
    async with running(mixed=1) as setup, opened(setup) as o:
        caption = o.page.locator("#chart-ttft figcaption")
        await expect(caption).to_contain_text("p95")
        assert "SLO" not in await caption.inner_text()
        scheduling = msgspec.structs.replace(setup.router.config.scheduling, ttft_slo_ms=250.0)
        setup.router.config = msgspec.structs.replace(setup.router.config, scheduling=scheduling)
        await expect(caption).to_contain_text("SLO 250 ms")
        assert o.troubles == []


@async_test
async def test_it_asks_for_the_key_once() -> None:
    async with running(mixed=1, api_keys=["secret"]) as setup, opened(setup) as o:
        page = o.page
        await expect(page.locator("#key-form")).to_be_visible()
        assert not await page.locator("#live").is_visible()
        await page.fill("#key", "guess")
        await page.press("#key", "Enter")
        await expect(page.locator("#key-wrong")).to_contain_text("does not know this key")
        await page.fill("#key", "secret")
        await page.press("#key", "Enter")
        await expect(page.locator("#verdict")).to_contain_text("The only engine is up")
        await page.reload()
        await expect(page.locator("#verdict")).to_contain_text("The only engine is up")
        # The browser itself notes each 401 in its console; nothing else may be there.
        assert all("401" in trouble for trouble in o.troubles) and len(o.troubles) == 2


@async_test
async def test_it_fits_a_phone_in_the_dark() -> None:
    async with running(mixed=3, policy="cache_aware") as setup, opened(setup, PHONE, "dark") as o:
        page = o.page
        assert await ask(setup, 1) == 200
        await expect(page.locator("#engines tbody tr")).to_have_count(3)
        overhang = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.evaluate(overhang) == 0
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(int(part) for part in background.strip("rgb()").split(",")) < 120
        assert o.troubles == []


@async_test
async def test_paused_it_stands_still_and_a_lost_router_is_told() -> None:
    async with running(mixed=1) as setup, opened(setup) as o:
        page = o.page
        await page.click("#pause")
        await expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
        before = await page.locator("#tiles").inner_text()
        assert await ask(setup, 1) == 200
        await page.wait_for_timeout(4000)
        assert await page.locator("#tiles").inner_text() == before
        await page.click("#pause")
        await expect(page.locator("#decisions details")).to_have_count(1)
        await page.route("**/dashboard/data*", lambda route: route.abort())
        await expect(page.locator("#lost")).to_contain_text("The router does not answer")
        await page.unroute("**/dashboard/data*")
        await expect(page.locator("#lost")).to_be_hidden()
