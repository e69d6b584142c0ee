"""The monitor's page in headless Chromium: it draws, updates itself, escapes names, fits a phone, reports failures."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.swarm.support import page_sample
from tests.swarm.support.chromium import Chromium, Tab
from tests.swarm.support.harness import Swarm
from tests.swarm.support.page_sample import Json
from tests.swarm.support.page_server import PageServer

pytestmark = pytest.mark.needs("chromium")
LIVE = "document.querySelector('#connection')?.dataset.state === 'live'"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
NAMES = "[...document.querySelectorAll('#peers tbody .name bdi')].map(it => it.textContent)"
JOIN = "[...document.querySelectorAll('#join code')].map(it => it.textContent)"
DOCKER = 'docker run --init --stop-timeout 900 --hostname "$(hostname -s)" --gpus all'
PUBLIC = f"/ip4/203.0.113.7/tcp/31337/p2p/{page_sample.peer_id(10_000)}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    it = Chromium(tmp_path_factory.mktemp("chromium"))
    try:
        yield it
    finally:
        it.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., PageServer]]:
    servers: list[PageServer] = []

    def start(swarm: Callable[[], Json | None], port: int = 0) -> PageServer:
        servers.append(PageServer(swarm, port))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def of(n: int, minutes: float = 10, names: list[str] | None = None) -> Callable[[], Json]:
    """A swarm with one healthy run that continues."""
    began = time.time() - 60 * minutes

    def swarm() -> Json:
        now = time.time()
        return page_sample.swarm([page_sample.run("demo", n, now, began, names)], now)

    return swarm


def opened(browser: Chromium, server: PageServer, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
    tab = browser.tab(width, height, dark)
    tab.open(server.address)
    tab.wait(LIVE)
    return tab


def test_it_shows_the_swarm_and_updates_itself_in_place(browser: Chromium, serve: Callable[..., PageServer]) -> None:
    server = serve(of(4))
    tab = opened(browser, server)
    assert tab.ask(NAMES) == ["peer-0", "peer-1", "peer-2", "peer-3"]
    assert tab.ask("document.title") == "demo · 4 peers"
    for chart in ("idle", "loss", "speed"):
        assert tab.ask(f"document.querySelectorAll('#{chart} .lines path[d]').length") == 4
        assert tab.ask(f"document.querySelector('#{chart} svg').getAttribute('aria-label')")
    assert tab.ask("document.querySelectorAll('#meetings .edges path').length") == 6
    assert "healthy: below 10%" in tab.ask("document.querySelector('#idle').textContent")
    assert tab.ask(JOIN)[:2] == [
        f"noloco-peer join {PUBLIC}",
        f"{DOCKER} -v noloco:/data noloco-peer:0.1.0 join {PUBLIC}",
    ]
    assert json.loads(tab.ask(JOIN)[-1])["run"]["name"] == "demo"
    # a selection, a followed peer and the elements themselves survive the updates
    tab.click("#peers tbody tr:nth-child(2) .name button")
    tab.ask("window.row = document.querySelector('#peers tbody tr')")
    tab.ask("getSelection().selectAllChildren(row.querySelector('bdi'))")
    step, asked = tab.ask("row.querySelector('.step').textContent"), server.asked
    tab.wait(f"row.querySelector('.step').textContent !== {json.dumps(step)}")
    assert server.asked > asked
    assert tab.ask("getSelection().toString()") == "peer-0"
    assert tab.ask("row.isConnected && document.querySelectorAll('#peers tbody tr').length === 4")
    assert tab.ask(
        "document.querySelector('#idle .lines .chosen') === document.querySelector('#idle .lines').lastChild"
    )
    assert page_sample.peer_id(1) in tab.ask("document.querySelector('#details').textContent")
    assert tab.errors == [] and server.missing == []


def test_a_node_that_is_on_loopback_only_is_joined_on_this_machine(
    browser: Chromium, serve: Callable[..., PageServer]
) -> None:
    """As that of noloco-peer swarm; a container has a loopback of its own."""
    swarm = of(4)
    tab = opened(browser, serve(lambda: (it := swarm()) | {"addresses": it["addresses"][:1]}))
    (local,) = {it for it in tab.ask(JOIN) if it.startswith("/ip4/")}
    assert tab.ask(JOIN)[0] == f"noloco-peer join {local}" and not any("docker" in it for it in tab.ask(JOIN))
    assert "on this machine" in tab.ask("document.querySelector('#join').textContent")


def test_a_name_that_only_containers_know_is_offered_to_no_other_machine(
    browser: Chromium, serve: Callable[..., PageServer]
) -> None:
    """compose.yaml announces it before all others."""
    swarm, inner = of(4), f"/dns4/bootstrap/tcp/31337/p2p/{page_sample.peer_id(10_000)}"
    tab = opened(browser, serve(lambda: (it := swarm()) | {"addresses": [inner, *it["addresses"]]}))
    assert tab.ask(JOIN)[0] == f"noloco-peer join {PUBLIC}"
    alone = opened(browser, serve(lambda: swarm() | {"addresses": [inner]}))
    assert not any("docker" in it for it in alone.ask(JOIN))
    assert "from a container" in alone.ask("document.querySelector('#join').textContent")


def test_peers_come_and_go_and_the_table_is_sorted(browser: Chromium, serve: Callable[..., PageServer]) -> None:
    server = serve(of(0))
    tab = opened(browser, server)
    assert tab.ask("!document.querySelector('#empty').hidden && document.querySelector('#run').hidden")
    assert tab.ask(JOIN)[0] == f"noloco-peer train --config FILE --initial-peers {PUBLIC}"
    server.swarm = of(12)
    tab.wait(f"{NAMES}.length === 12")
    assert tab.ask(NAMES)[1:3] == ["peer-1", "peer-2"] and tab.ask("document.querySelector('#empty').hidden")
    assert (
        tab.ask("document.querySelectorAll('#idle .lines .middle').length") == 1
    )  # too many for colours: a median line
    tab.click("#peers thead .rate button")
    rates = [
        float(it.replace(",", ""))
        for it in tab.ask("[...document.querySelectorAll('td.rate')].map(it => it.textContent)")
    ]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) > 1
    server.swarm = of(3)
    tab.wait(f"{NAMES}.length === 3")
    assert tab.ask("document.querySelectorAll('#meetings .nodes circle').length") == 3
    assert tab.errors == []


def test_loss_against_steps_and_the_value_under_the_pointer(
    browser: Chromium, serve: Callable[..., PageServer]
) -> None:
    tab = opened(browser, serve(of(4)))
    tab.click("[name=against][value=step]")
    spot = tab.ask(
        "(() => { const dot = document.querySelector('#loss .lines g:last-child circle');"
        " dot.scrollIntoView({block: 'center'}); const at = dot.getBoundingClientRect();"
        " return [at.x + 2, at.y + 2] })()"
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=spot[0], y=spot[1])
    tab.wait("/peer-\\d. · step [\\d,]+ · \\d\\.\\d\\d/.test(document.querySelector('#loss output').textContent)")
    assert tab.errors == []


def test_strings_from_other_peers_stay_text(browser: Chromium, serve: Callable[..., PageServer]) -> None:
    evil = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"

    def hostile() -> Json:
        swarm = of(8, names=page_sample.HOSTILE)()
        run = page_sample.with_warnings(swarm["runs"][0])
        for peer in run["peers"]:
            peer.update(version=evil, config=evil)
        swarm["contributors"] += [{"run": evil, "tokens": "x", "count": None, "peers": [None, {"name": evil}]}]
        swarm["contributors"][0]["run"] = evil
        run["warnings"].append({"kind": evil, "peer": evil, "text": evil})
        run["events"].append({"at": "soon", "event": evil, "name": evil, "peer_id": evil})
        run["meetings"].append({"a": evil, "b": None, "age": "old", "count": None})
        run["peers"][4].update(step=None, history=[None, [1], ["x", "y", "z", 0]], partners=[evil], train_loss="low")
        run["run"] = evil
        return {**swarm, "addresses": [evil]}

    server = serve(hostile)
    tab = opened(browser, server)
    for i in range(1, 9):
        tab.click(f"#peers tbody tr:nth-child({i}) .name button")
    shown = tab.ask(NAMES)
    assert len(shown) == len(set(shown)) == 8
    assert page_sample.HOSTILE[0] in shown and page_sample.HOSTILE[1] in shown
    assert not any("\u202e" in name or "\u2066" in name for name in shown)
    assert all(name.strip("\u200b\u2060 ") for name in shown)
    assert evil in tab.ask("document.querySelector('#warnings').textContent")
    assert tab.ask("document.scripts.length") == 1 and tab.ask("document.images.length") == 1
    assert tab.ask("document.title") != "owned"
    tab.resize(360, 700)
    assert tab.ask(OVERFLOW) <= 0
    assert tab.errors == [] and server.missing == []


def test_the_largest_values_of_a_record_are_drawn(browser: Chromium, serve: Callable[..., PageServer]) -> None:
    """At the bounds of swarm/directory/records.py; and what is not finite, as null."""

    def extreme() -> Json:
        swarm = of(8)()
        run = swarm["runs"][0]
        run.update(members=6_120, unnamed=5_608, step=2**53, tokens=6_120 * 2**53, tokens_per_second=None)
        for sign, peer in zip((1, -1) * 4, run["peers"], strict=True):
            large = {**dict.fromkeys(("train_loss", "val_loss"), sign * 3.5e38), "tokens_per_second": 1e12, "age": 1e10}
            counters = dict.fromkeys(("step", "round", "tokens", "members", "refused"), 2**53)
            peer.update(**large, **counters, merged_age=1e10, idle_share=None)
            peer["history"] = [
                [at, 2**53 * i % (2**53 + 1), sign * 3.5e38, i % 2] for i, (at, *_) in enumerate(peer["history"])
            ]
        return swarm

    tab = opened(browser, serve(extreme))
    assert "5,608 without a row" in tab.ask("document.querySelector('#figures').textContent")
    for i in range(1, 9):
        tab.click(f"#peers tbody tr:nth-child({i}) .name button")
    tab.click("[name=against][value=step]")
    assert not tab.ask("/NaN|Infinity|undefined/.test(document.body.textContent)")
    assert not tab.ask("[...document.querySelectorAll('svg *')].some(it => /NaN|Infinity/.test(it.outerHTML))")
    tab.resize(360, 700)
    assert tab.ask(OVERFLOW) <= 0
    assert tab.errors == []


def test_the_slowest_peer_is_one_that_trains(browser: Chromium, serve: Callable[..., PageServer]) -> None:
    now = time.time()
    run = page_sample.run("demo", 5, now, now - 300)
    rates = {"training": [3000.0, 1000.0, 2000.0], "paused": [0.0], "waiting": [0.0]}
    said = [(state, rate) for state, given in rates.items() for rate in given]
    for peer, (state, rate) in zip(run["peers"], said, strict=True):
        peer.update(state=state, tokens_per_second=rate)
    tab = opened(browser, serve(lambda: page_sample.swarm([run], now)))
    caption = "document.querySelector('#speed figcaption').textContent"
    words = tab.ask(caption)
    assert "Now: median 2,000 tokens/s" in words and "peer-1" in words and "with 1,000." in words
    for peer in run["peers"]:
        peer.update(state="paused", tokens_per_second=0.0)
    tab.wait(f"{caption}.endsWith('Now: no peer trains.')")
    assert tab.errors == []


def test_the_tokens_of_a_run_are_those_of_its_contributors(browser: Chromium, serve: Callable[..., PageServer]) -> None:
    """The records count since each peer's last start, so their sum falls when peers resume."""
    now = time.time()
    swarm = page_sample.swarm([page_sample.run("demo", 2, now, now - 300)], now)
    swarm["runs"][0]["tokens"], swarm["contributors"][0]["tokens"] = 1000, 7000
    tab = opened(browser, serve(lambda: swarm))
    tokens = "[...document.querySelectorAll('#figures > div')].find(it => it.firstChild.textContent === 'Tokens')"
    assert tab.ask(f"{tokens}.textContent") == "Tokens7,000of all contributors"
    tab.click("[name=against][value=step]")  # draws it again
    assert tab.ask(f"{tokens}.textContent") == "Tokens7,000of all contributors"
    for none in ([], [{"run": "demo", "tokens": 0, "count": 0, "peers": []}]):
        swarm["contributors"] = none
        tab.wait(f'{tokens}.textContent === "Tokens1,000since each peer\'s last start"')
        swarm["contributors"] = [{"run": "demo", "tokens": 8000, "count": 0, "peers": []}]
        tab.wait(f"{tokens}.textContent === 'Tokens8,000of all contributors'")
    assert tab.errors == []


def test_an_event_of_another_day_has_its_date(browser: Chromium, serve: Callable[..., PageServer]) -> None:
    now = time.time()
    swarm = page_sample.swarm([page_sample.run("demo", 2, now, now - 300)], now)
    event = {"event": "joined", "name": "a", "peer_id": page_sample.peer_id(0)}
    swarm["runs"][0]["events"] = [{**event, "at": now - 2 * 86_400}, {**event, "at": now}]
    tab = opened(browser, serve(lambda: swarm))
    then, today = time.localtime(now - 2 * 86_400), time.localtime(now)
    texts = tab.ask("[...document.querySelectorAll('#events time')].map(it => it.textContent)")
    dated = [f"{time.strftime('%b', it)} {it.tm_mday}, {time.strftime('%H:%M:%S', it)}" for it in (today, then)]
    assert texts[1] == dated[1]
    assert texts[0] in (time.strftime("%H:%M:%S", today), dated[0]), "it is dated if midnight came meanwhile"
    assert tab.errors == []


@pytest.mark.parametrize("n", [0, 4, 200])
def test_a_phone_needs_no_horizontal_scrolling(browser: Chromium, serve: Callable[..., PageServer], n: int) -> None:
    began = time.time() - 600

    def swarm() -> Json:
        now = time.time()
        it = page_sample.run("demo", n, now, began)
        return page_sample.swarm([page_sample.with_warnings(it) if n else it], now)

    tab = opened(browser, serve(swarm), 360, 740)
    assert tab.ask("document.querySelectorAll('#peers tbody tr').length") == n
    assert tab.ask(OVERFLOW) <= 0
    assert tab.ask("document.querySelector('#warnings').hidden") == (n == 0)
    assert tab.ask("getComputedStyle(document.querySelector('#idle .healthy')).fill") != "none"
    assert tab.errors == []


CUT = """(() => {
  const found = [];
  const wide = document.documentElement.clientWidth;
  const note = (why, node) => found.push([why, node.tagName, node.textContent.slice(0, 60)]);
  for (const node of document.querySelectorAll("body *")) {
    const box = node.getBoundingClientRect();
    if (!box.width || node.closest("svg, #peers .scroll, .switch input")) continue;
    if (box.left < -0.5 || box.right > wide + 0.5) note("outside", node);
    const hides = getComputedStyle(node).overflowX !== "visible" && node.scrollWidth > node.clientWidth + 1;
    if (hides && node.textContent.trim()) note("cut", node);
  }
  for (const text of document.querySelectorAll("svg text")) {
    const box = text.getBoundingClientRect();
    const plot = text.closest(".plot").getBoundingClientRect();
    const across = box.left > plot.left - 1 && box.right < plot.right + 1;
    if (box.width && !(across && box.top > plot.top - 1 && box.bottom < plot.bottom + 1)) note("label", text);
  }
  return found;
})()"""  # elements that leave the page, and texts that are not whole; the table of peers scrolls in itself


@pytest.mark.parametrize("state", ["live", "warned", "ended"])
@pytest.mark.parametrize("n", [1, 4, 12])
def test_at_the_width_of_a_phone_nothing_is_cut(
    browser: Chromium, serve: Callable[..., PageServer], n: int, state: str
) -> None:
    began = time.time() - 7500

    def swarm() -> Json:
        it = page_sample.run("demo", n, time.time(), began)
        if state == "warned" and n > 3:
            it = page_sample.with_warnings(it)
        elif state == "ended":
            it = page_sample.ended(it, 7500.0)
        return page_sample.swarm([it], time.time())

    tab = opened(browser, serve(swarm), 375, 812)
    assert tab.ask("document.querySelectorAll('#contributors tbody tr').length") == n
    tab.click("#peers tbody tr .name button")  # its details open
    assert tab.ask(OVERFLOW) <= 0
    assert tab.ask(CUT) == []
    assert tab.errors == []


def test_a_run_that_has_ended_keeps_its_figures_and_says_when_it_ended(
    browser: Chromium, serve: Callable[..., PageServer]
) -> None:
    now = time.time()
    server = serve(lambda: page_sample.swarm([page_sample.run("demo", 4, now, now - 600)], now))
    tab = opened(browser, server)
    figures = "[...document.querySelectorAll('#figures dd:nth-child(2)')].map(it => it.textContent)"
    before, given = tab.ask(figures), tab.ask("document.querySelector('#contributors').innerText")
    assert tab.ask("document.querySelector('#ended').hidden") and "–" not in before
    last = page_sample.ended(page_sample.run("demo", 4, now, now - 600), 7500.0)
    server.swarm = lambda: page_sample.swarm([last], now)
    tab.wait("!document.querySelector('#ended').hidden")
    assert "This run ended 2 h 5 min ago" in tab.ask("document.querySelector('#ended').innerText")
    assert tab.ask(figures) == before and tab.ask("document.title") == "demo · ended"
    assert "most " in tab.ask("document.querySelector('#idle figcaption').textContent")
    assert tab.ask("document.querySelector('#loss figcaption').textContent").startswith("At the end: median")
    assert tab.ask(JOIN)[0] == f"noloco-peer train --config FILE --initial-peers {PUBLIC}"  # nobody is there to join
    assert "2 h 5 min ago" in tab.ask("document.querySelector('#contributors').innerText") != given
    table = page_sample.swarm([last], now)["contributors"]
    server.swarm = lambda: {**page_sample.swarm([], now), "contributors": table}
    tab.wait("document.querySelector('#run').hidden")  # the node was restarted: the table stays
    assert tab.ask("document.querySelectorAll('#contributors tbody tr').length") == 4
    assert tab.errors == []


def test_it_reports_a_lost_bootstrap_node_and_recovers(browser: Chromium, serve: Callable[..., PageServer]) -> None:
    server = serve(of(4))
    tab = opened(browser, server)
    server.close()
    tab.wait("document.querySelector('#connection').dataset.state === 'gone'")
    assert "does not answer" in tab.ask("document.querySelector('#trouble').textContent")
    assert len(tab.ask(NAMES)) == 4 and tab.ask("document.body.classList.contains('stale')")
    again = serve(lambda: None, server.port)
    tab.wait("document.querySelector('#connection').dataset.state === 'unread'")
    assert "no answer from the DHT within 3 s" in tab.ask("document.querySelector('#trouble').textContent")
    again.swarm = of(5)
    tab.wait(LIVE)
    assert len(tab.ask(NAMES)) == 5 and not tab.ask("document.body.classList.contains('stale')")
    assert tab.ask("document.querySelector('#trouble').hidden")
    again.swarm = lambda: {"runs": "none"}
    tab.wait("document.querySelector('#connection').dataset.state === 'strange'")
    assert not [it for it in tab.errors if "swarm.json" not in it]


def test_the_line_that_joins_is_right_for_every_run(browser: Chromium, serve: Callable[..., PageServer]) -> None:
    now = time.time()
    runs = [page_sample.run(name, 2, now, now - 300) for name in ("open", "closed", "program", "unread")]
    runs[1]["configuration"] = page_sample.configuration({"name": "closed", "admission": "invite"}, 2)
    runs[2]["configuration"] = page_sample.configuration(None, 2, own_program=True)
    runs[3]["configuration"] = None
    swarm = page_sample.swarm(runs, now)
    tab = opened(browser, serve(lambda: swarm))
    docker, image = (
        'docker run --init --stop-timeout 900 --hostname "$(hostname -s)" --gpus all',
        f"noloco-peer:0.1.0 join {PUBLIC}",
    )
    lines = [
        [f"noloco-peer join {PUBLIC} --run open", f"{docker} -v noloco:/data {image} --run open"],
        [
            f"noloco-peer join {PUBLIC} --run closed --invitation FILE",
            f'{docker} -v "$PWD/FILE:/invitation:ro" -v noloco:/data {image} --run closed --invitation /invitation',
        ],
        [f'initial_peers="{PUBLIC}"'],
        [f"noloco-peer join {PUBLIC} --run unread"],
    ]
    for number, wanted in enumerate(lines, start=1):
        tab.click(f"#runs button:nth-child({number})")
        tab.wait(f"document.querySelector('#runs button:nth-child({number})').getAttribute('aria-current') === 'true'")
        assert tab.ask(JOIN)[: len(wanted)] == wanted
        assert (tab.ask(JOIN)[-1][0] == "{") == (number in (1, 2))
    swarm["invited"], swarm["runs"] = True, [runs[0]]
    tab.wait(f"{JOIN}[0].endsWith('--invitation FILE')")
    swarm["runs"] = [{**runs[0], "run": "a; rm -rf /"}, runs[1]]
    tab.wait(f"{JOIN}[0] === 'noloco-peer join {PUBLIC} --invitation FILE'")
    assert tab.errors == []


def test_several_runs_are_chosen_by_name(browser: Chromium, serve: Callable[..., PageServer]) -> None:
    now = time.time()
    runs = [
        page_sample.run("one", 3, now, now - 300),
        page_sample.with_warnings(page_sample.run("two", 5, now, now - 300)),
    ]
    tab = opened(browser, serve(lambda: page_sample.swarm(runs, now)))
    assert len(tab.ask(NAMES)) == 3
    assert "Slow peer in two" in tab.ask("document.querySelector('#warnings').innerText")
    tab.click("#runs button:nth-child(2)")
    assert len(tab.ask(NAMES)) == 5
    tab.wait("document.querySelector('#runs [aria-current=true]').textContent.startsWith('two')")
    assert tab.errors == []


def test_the_dark_page_is_dark(browser: Chromium, serve: Callable[..., PageServer], tmp_path: Path) -> None:
    tab = opened(browser, serve(of(4)), dark=True)
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 24)"
    tab.picture(tmp_path / "dark.png")
    assert (tmp_path / "dark.png").stat().st_size > 10_000


@pytest.mark.smoke
def test_a_real_swarm_on_a_real_bootstrap_node(browser: Chromium, swarm: Swarm) -> None:
    bootstrap, address = swarm.bootstrap()
    tab = browser.tab()
    tab.open("http://" + bootstrap.line(r"http=(\S+)").group(1))
    tab.wait(LIVE)
    tab.wait("!document.querySelector('#empty').hidden")
    assert tab.ask(JOIN)[0] == f"noloco-peer train --config FILE --initial-peers {address}"
    for name in ("ann", "bob"):
        swarm.peer(name, "run.steps=100000", address=address)
    tab.wait(f"{NAMES}.join() === 'ann,bob'", 90)
    tab.wait("document.querySelectorAll('#meetings .edges path').length === 1", 60)
    tab.wait("document.querySelectorAll('#loss .lines path[d]').length === 2", 60)
    tab.wait(f"{JOIN}[0] === 'noloco-peer join {address}' && {JOIN}.at(-1).startsWith('{{\"run\":')", 60)
    assert tab.errors == []
    bootstrap.signal(signal.SIGKILL)
    tab.wait("document.querySelector('#connection').dataset.state === 'gone'")
    assert tab.ask(NAMES) == ["ann", "bob"]
