"""The report page: what is on it, what it refuses, what it says about broken input, and what a browser makes of it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from orchestra_jax.report import write_report
from orchestra_jax.report.load import load_run
from orchestra_jax.report.page import headline
from orchestra_jax.report.policies import policy_rows

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found")
MARK = "document.documentElement.dataset.hacked=1"
HOSTILE = (
    f"</script><script>{MARK}</script><img src=x onerror='{MARK}'><!--<script>"
    "{{ 7*7 }}{% raw %}${" + MARK + "}\u2028]]>&lt;b&gt;\ud800\x00"
)


class Tags(HTMLParser):
    """Elements of a page with their attributes, and the text inside each script."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self._in_script = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data


def page_data(page):
    return json.loads(Tags(page).scripts[0])


def text_of(page):
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def dump_dom(page_path, profile, width=1280, fragment=""):
    """The document after its script has run, as Chromium writes it."""
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={profile}", f"--window-size={width},900", "--virtual-time-budget=3000", "--dump-dom"),
        page_path.resolve().as_uri() + fragment,
    ]
    result = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return result.stdout.decode("utf-8", errors="replace")


def small_run(folder, **files):
    """A run folder with the given files; keys are names with ``__`` for a dot."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return folder


# --- content ---


def test_page_shows_every_part(finished_run, tmp_path):
    page = write_report(finished_run, tmp_path / "sub" / "page.html").read_text(encoding="utf-8")
    text = text_of(page)
    assert "orchestra/Market-v0" in text
    assert "90.2% 87.3–93.1" in text  # accuracy of the trained policy with its interval
    assert "0.830¢ 0.75–0.92" in text  # cost per task in cents
    assert "0.920¢ 0.81–1.0" in text  # per solved task
    data = page_data(page)
    assert [p["name"] for p in data["policies"][:2]] == ["trained", "trained:greedy"]
    assert data["policies"][-1]["name"] == "oracle"
    assert set(data["curves"]) == {"sft", "train"}
    assert data["curves"]["train"]["steps"] == list(range(1, 151))
    assert len(data["curves"]["train"]["series"]["reward/mean"]) == 150
    assert "time/rollout_s" in data["curves"]["train"]["series"]
    assert "config.yaml" in text


def test_page_is_self_contained(finished_run, tmp_path):
    page = write_report(finished_run, tmp_path / "page.html").read_text(encoding="utf-8")
    parsed = Tags(page)
    for tag, attrs in parsed.tags:
        assert tag not in {"img", "iframe", "object", "embed", "base"}
        assert "src" not in attrs
        assert attrs.get("href", "data:,") == "data:,"
        assert not [name for name in attrs if name.startswith("on")]
    code = page.replace(parsed.scripts[0], "")
    assert re.findall(r"https?://[^\s\"']+", code) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|fetch\(", code)


def test_default_place_is_the_run_folder(tmp_path):
    run = small_run(tmp_path / "run", config__yaml="seed: 1\n")
    (run / "report.html").write_text("old")
    assert write_report(run) == run / "report.html"
    assert "<!doctype html>" in (run / "report.html").read_text()
    assert {path.name for path in run.iterdir()} == {"config.yaml", "report.html"}


def test_best_of_each_column_leaves_out_the_oracle(finished_run, tmp_path):
    page = write_report(finished_run, tmp_path / "page.html").read_text(encoding="utf-8")
    best = re.findall(r'class="mean best">([^<]+)<', page)
    assert best == ["91.8%", "0.840", "0¢", "0¢", "0.050\N{NO-BREAK SPACE}s", "0¢", "0¢", "0.050\N{NO-BREAK SPACE}s"]


def test_trajectories_are_a_spread_sample_with_whole_groups(finished_run):
    run = load_run(finished_run)
    assert run.num_trajectories == 15 * 32 + 15 * 60
    assert len(run.trajectories) <= 500
    steps = [t["step"] for t in run.trajectories if t["is_training"]]
    assert min(steps) == 10
    assert max(steps) == 150
    members = {}
    for t in run.trajectories:
        if t["is_training"]:
            members.setdefault((t["source"], t["group"]), set()).add(t["member"])
    assert {len(group) for group in members.values()} == {8}
    assert {t["policy"] for t in run.trajectories if not t["is_training"]} >= {"trained", "oracle", "always:gpt-5"}


def test_page_stays_small_however_long_the_texts(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestra_jax.report.load.MAX_TRAJECTORY_BYTES", 60_000)
    turn = {"role": "assistant", "text": "x" * 100_000}
    lines = [json.dumps({"task_id": str(i), "outcome": 1.0, "turns": [turn]}) for i in range(5)]
    run = small_run(tmp_path / "run", config__yaml="")
    (run / "episodes").mkdir()
    (run / "episodes" / "eval-trained.jsonl").write_text("\n".join(lines) + "\n")
    loaded = load_run(run)
    assert (len(loaded.trajectories), loaded.num_trajectories) == (1, 5)
    assert "60000 more characters" in loaded.trajectories[0]["turns"][0]["text"]


def test_long_curves_are_averaged(tmp_path):
    rows = [json.dumps({"step": i, "reward/mean": float(i)}) for i in range(1, 4001)]
    curves = load_run(small_run(tmp_path / "run", metrics__jsonl="\n".join(rows) + "\n")).curves["train"]
    assert curves.steps[:2] == [3, 6]
    assert curves.steps[-1] == 4000
    assert curves.series["reward/mean"][:2] == [2.0, 5.0]


# --- headline ---


def summary_of(**policies):
    entries = {
        name.replace("__", ":"): {"accuracy": accuracy, "cost_usd": cents / 100, "latency_s": 1.0, "num_episodes": 9}
        for name, (accuracy, cents) in policies.items()
    }
    return json.dumps({"policies": entries})


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        (
            {"trained": (0.9, 0.5), "always__a": (0.88, 6.0), "always__b": (0.5, 0.1)},
            "12 times cheaper than “Always a”",
        ),
        ({"trained": (0.9, 4.5), "always__a": (0.88, 6.0)}, "25% cheaper than “Always a”"),
        ({"trained": (0.9, 9.0), "always__a": (0.88, 6.0)}, "50% dearer than"),
        ({"trained": (0.9, 6.1), "always__a": (0.88, 6.0)}, "at the price of"),
        ({"trained": (0.9, 0.0), "always__a": (0.88, 6.0)}, "at 0¢ each, against “Always a”"),
        ({"trained__greedy": (0.9, 1.0)}, "The trained policy, decoding greedily, solves 90.0%"),
        ({"cheapest": (0.3, 0.0), "random": (0.5, 1.0)}, "2 policies were compared; the most accurate is Random tool"),
    ],
)
def test_headline_says_the_result(tmp_path, policies, expected):
    run = load_run(small_run(tmp_path / "run", summary__json=summary_of(**policies)))
    assert expected in headline(run, policy_rows(run.summary))


def test_dropped_episodes_are_said(tmp_path):
    lost = {"accuracy": None, "cost_usd": None, "latency_s": None, "num_episodes": 0, "num_infra_errors": 8}
    some = {"accuracy": 1.0, "cost_usd": 0.1, "latency_s": 1.0, "num_episodes": 6, "num_infra_errors": 2}
    policies = {"trained": {**lost, "warning": "accuracy is not known"}, "random": {**some, "warning": "6 of 8"}}
    run = small_run(tmp_path / "run", summary__json=json.dumps({"policies": policies}))
    text = text_of(write_report(run).read_text(encoding="utf-8"))
    for expected in ("Policy trained: accuracy is not known.", "Policy random: 6 of 8.", "0 of 8 episodes"):
        assert expected in text
    assert "100% no interval 6 of 8 episodes" in text


# --- broken and partial input ---


def test_running_run_is_shown_as_such(tmp_path):
    row = {"step": 57, "phase": "train", "outcome/accuracy": 0.71, "cost/mean_usd": 0.019}
    run = small_run(tmp_path / "run", config__yaml="seed: 1", metrics__jsonl=json.dumps(row) + "\n")
    text = text_of(write_report(run).read_text(encoding="utf-8"))
    assert "at step 57 the policy solves 71.0% of its training tasks at 1.90¢ each" in text
    assert "There is no summary.json yet" in text
    assert "There are no trajectories in episodes/ yet" in text


@pytest.mark.parametrize("content", ["", "\n", '{"step": 1, "phase": "tr'])
def test_empty_or_cut_metrics(tmp_path, content):
    run = small_run(tmp_path / "run", metrics__jsonl=content)
    text = text_of(write_report(run).read_text(encoding="utf-8"))
    assert "metrics.jsonl holds no step yet" in text
    assert ("the last line is cut off" in text) == content.startswith("{")


def test_cut_last_line_and_broken_lines_are_told_apart(tmp_path):
    lines = [
        '{"step": 1, "reward/mean": 0.5}',
        "garbage",
        "[1]",
        '{"reward/mean": 1}',
        '{"step": 2, "reward/mean": NaN}',
    ]
    run = load_run(small_run(tmp_path / "run", metrics__jsonl="\n".join(lines) + '\n{"step": 3, "rew'))
    assert run.curves["train"].steps == [1.0, 2.0]
    assert run.curves["train"].series["reward/mean"] == [0.5, None]
    problems = " ".join(run.problems)
    assert "the last line is cut off" in problems
    assert "2 line(s) are no JSON object and left out (line 2, 3)" in problems
    assert '1 line(s) without a numeric "step"' in problems


def test_steps_repeated_by_a_resume_show_the_later(tmp_path):
    rows = [{"step": s, "reward/mean": r} for s, r in [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.7), (3, 0.8)]]
    run = load_run(small_run(tmp_path / "run", metrics__jsonl="".join(json.dumps(r) + "\n" for r in rows)))
    assert run.curves["train"].series["reward/mean"] == [0.1, 0.7, 0.8]
    assert "2 step(s) were written again" in " ".join(run.problems)


@pytest.mark.parametrize(
    ("summary", "problem"),
    [
        ("{", "summary.json is not valid JSON"),
        ("[]", 'no "policies" object'),
        (
            '{"policies": {"trained": {"accuracy": "high", "cost_usd": 1, "latency_s": NaN}}}',
            "no usable accuracy, latency_s",
        ),
        ('{"policies": {"trained": null}}', "no usable accuracy, cost_usd, latency_s"),
        ('{"policies": {"trained": {"accuracy": 1' + "0" * 400 + ', "ci95": 3}}}', "no usable accuracy"),
        ("[" * 100_000, "summary.json is not valid JSON"),
    ],
)
def test_broken_summary_is_said_on_the_page(tmp_path, summary, problem):
    run = small_run(tmp_path / "run", summary__json=summary)
    write_report(run)
    assert problem in " ".join(load_run(run).problems)


@pytest.mark.parametrize(
    "record", [{}, {"turns": "none"}, {"turns": [1, {"calls": {}}], "outcome": "yes", "tool_counts": []}]
)
def test_trajectories_with_missing_or_odd_fields(tmp_path, record):
    run = small_run(tmp_path / "run", config__yaml="")
    (run / "episodes").mkdir()
    (run / "episodes" / "eval-random.jsonl").write_text(json.dumps(record) + "\n")
    [trajectory] = page_data(write_report(run).read_text(encoding="utf-8"))["trajectories"]
    assert trajectory["policy"] == "random"
    assert trajectory["outcome"] is None


def test_token_logprobs_need_one_each(tmp_path):
    turns = [
        {"role": "assistant", "text": "ab", "tokens": ["a", "b"], "logprobs": [-0.123456, None]},
        {"role": "assistant", "text": "ab", "tokens": ["a", "b"], "logprobs": [-0.1]},
    ]
    run = small_run(tmp_path / "run", config__yaml="")
    (run / "episodes").mkdir()
    (run / "episodes" / "eval-trained.jsonl").write_text(json.dumps({"turns": turns}) + "\n")
    [trajectory] = load_run(run).trajectories
    assert trajectory["turns"][0]["logprobs"] == [-0.1235, None]
    assert "tokens" not in trajectory["turns"][1]


def test_no_run_folder_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist; give the folder"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        write_report(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no run folder: it has none of config\.yaml, metrics\.jsonl"):
        write_report(tmp_path / "empty")


# --- hostile text ---


def hostile_run(folder):
    """Text of an attacker in every place that a run can carry text."""
    call = dict.fromkeys(("tool", "arguments", "text", "status", "error_type", "source"), HOSTILE)
    turn = {"role": HOSTILE, "text": HOSTILE, "calls": [call], "tokens": [HOSTILE], "logprobs": [-1.0]}
    trajectory = dict.fromkeys(("policy", "task_id", "group", "member", "prompt", "end_reason", "dropped"), HOSTILE)
    trajectory |= {"turns": [turn, turn | {"role": "assistant"}], "outcome": 1.0, "tool_counts": {HOSTILE: 1}}
    row = {"step": 1, "phase": HOSTILE, HOSTILE: 1.0, f"tools/{HOSTILE}/calls": 1.0}
    entry = {"accuracy": 0.5, "cost_usd": 0.01, "latency_s": 1.0}
    small_run(
        folder,
        config__yaml=HOSTILE.replace("\ud800", ""),
        summary__json=json.dumps(
            {
                "env_id": HOSTILE,
                "seed": HOSTILE,
                "policies": {HOSTILE: entry, "trained": entry, f"always:{HOSTILE}": entry},
            }
        ),
        metrics__jsonl=json.dumps(row) + "\n" + json.dumps(row | {"phase": "train"}) + "\n",
    )
    (folder / "episodes").mkdir()
    (folder / "episodes" / "eval-trained.jsonl").write_text(json.dumps(trajectory) + "\n")
    return folder


def test_hostile_text_stays_text(tmp_path):
    page = write_report(hostile_run(tmp_path / "run")).read_text(encoding="utf-8")
    parsed = Tags(page)
    assert len(parsed.scripts) == 2  # the data and our script
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert "{{ 7*7 }}" in page  # template syntax is shown, not run
    assert "<" not in parsed.scripts[0]
    [trajectory] = page_data(page)["trajectories"]
    assert trajectory["turns"][0]["text"] == HOSTILE.replace("\ud800", "\ufffd")


@needs_chromium
def test_hostile_text_stays_text_in_chromium(tmp_path):
    page = write_report(hostile_run(tmp_path / "run"))
    dom = dump_dom(page, tmp_path / "profile", fragment="#trajectory=0")
    parsed = Tags(dom)
    assert ("html", {"lang": "en", "data-ready": "true"}) in parsed.tags
    assert not {"img", "iframe"} & {tag for tag, _ in parsed.tags}
    assert len(parsed.scripts) == 2
    assert not [attrs for _, attrs in parsed.tags if any(name.startswith("on") for name in attrs)]
    assert dom.count(MARK) > 10  # it is there to read


# --- a real browser ---


@needs_chromium
@pytest.mark.parametrize("width", [1280, 500])
def test_chromium_draws_everything(finished_run, tmp_path, width):
    page = write_report(finished_run, tmp_path / "page.html")
    dom = dump_dom(page, tmp_path / "profile", width, "#trajectory=3")
    parsed = Tags(dom)
    assert ("html", {"lang": "en", "data-ready": "true"}) in parsed.tags
    labels = [attrs.get("aria-label", "") for tag, attrs in parsed.tags if tag == "svg"]
    for title in (
        "Reward",
        "Accuracy on training tasks",
        "Cost per task",
        "Latency per task",
        "Tool calls per task",
        "Dropped trajectories, by reason",
        "Policy loss",
        "Logprobs: sampler against trainer",
        "Time per step",
    ):
        assert f"{title} over steps 1 to 150" in labels
    assert "Loss on the traces over steps 1 to 120" in labels
    text = text_of(dom)
    assert "NaN" not in text
    assert "undefined" not in text
    assert sum(attrs.get("class") == "hit" for tag, attrs in parsed.tags if tag == "circle") == 15
    assert sum(attrs.get("class") == "turn assistant" for _, attrs in parsed.tags) == 2
    assert "Answer:" in text


@needs_chromium
def test_chromium_copes_with_a_run_that_has_only_begun(tmp_path):
    run = small_run(tmp_path / "run", metrics__jsonl='{"step": 1, "reward/mean": 0.5, "tools/search/calls": 1}\n')
    dom = dump_dom(write_report(run), tmp_path / "profile")
    assert 'data-ready="true"' in dom
    assert "Reward over steps 1 to 1" in dom
    assert "NaN" not in text_of(dom)
